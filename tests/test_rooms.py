"""The rules that hold over the source itself: who imports whom, and what is never called."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for room in ("mrl", "moe", "parallel", "benchmarks", "launch")
                 for p in (ROOT / room).rglob("*.py"))  # fmt: skip
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_LINES = 350

BASE = {
    *("mrl", "mrl.types", "mrl.config", "mrl.errors"),
    *("mrl.histogram", "mrl.processes", "mrl.shared_bytes", "mrl.shared_memory", "mrl.plugins"),
}
"""Everyone may import these; `mrl` itself holds the version only."""
ROOMS = {
    "mrl.types": set(),
    "mrl.errors": set(),
    "mrl.histogram": set(),
    "mrl.processes": set(),
    "mrl.shared_bytes": set(),
    "mrl.shared_memory": set(),
    "mrl.plugins": set(),
    "mrl.config": set(),
    "mrl.kernels": {"mrl._C"},
    "mrl.algorithms": {"mrl.kernels"},
    "mrl.rewards": set(),
    "mrl.environments": {"mrl.rewards"},
    "mrl.data": set(),
    "mrl.rollout": {
        *("moe.trace", "mrl.kernels.digest"),
        *("mrl.kernels.invariant", "mrl.kernels.vp_logprob"),
    },
    "moe": {"mrl.kernels"},
    "parallel": {"mrl.kernels", "moe"},
}
"""What a room may import of the project beside BASE and itself. Files that are in no room, the
loop and the commands, join the rooms and may import all of them."""


def within(module, package):
    return module == package or module.startswith(package + ".")


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree):
    """Dotted names; `from a import b` gives both `a` (as its package runs) and, if it is one, `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room"
            yield node.module
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                target = ROOT / inner.replace(".", "/")
                if target.is_dir() or target.with_suffix(".py").is_file() or alias.name == "_C":
                    yield inner


def broken_import_rules(module, tree):
    room = next((name for name in ROOMS if within(module, name)), None)
    for name in imports(tree):
        if within(name, "megatron") and not (within(module, "parallel") or module == "moe.replay"):
            yield f"{module} imports {name}: Megatron is for parallel/ and moe/replay.py"
        if within(name, "sglang") and not within(module, "mrl.rollout"):
            yield f"{module} imports {name}: SGLang is for mrl/rollout/"
        own = name.split(".")[0] in ("mrl", "moe", "parallel")
        if room is None or not own or name in BASE or within(name, room):
            continue
        if not any(within(name, allowed) for allowed in ROOMS[room]):
            yield f"{module} imports {name}: not among {sorted(ROOMS[room] | BASE)}"


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


UNPICKLERS = {f"{module}.{name}" for module in ("pickle", "dill", "cloudpickle", "marshal", "shelve")
              for name in ("load", "loads", "open", "Unpickler")}  # fmt: skip


def broken_security_rules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            yield "listens on every interface"
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if names & (UNPICKLERS | {"torch.load", "os.system", "os.popen"}):
                yield "imports a dangerous function by name, out of these rules' sight"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        options = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
        if name in UNPICKLERS:
            yield f"{name}: unpickles"
        if name == "torch.load" and options.get("weights_only") is not True:
            yield "torch.load without weights_only=True"
        if name in ("eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen"):
            yield f"{name}: runs text as code"
        for option in ("shell", "allow_pickle", "trust_remote_code"):
            if options.get(option) is True:
                yield f"{option}=True"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_keeps_the_rules(path):
    tree = ast.parse(path.read_text())
    broken = list(broken_security_rules(tree))
    if "cpu_stubs" not in path.parts:  # these stand in for other packages, rooms of their own
        broken += broken_import_rules(module_of(path), tree)
    assert not broken


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("mrl.data.reader", "from mrl.rewards import base"),
        ("mrl.data.reader", "from mrl import rewards"),
        ("mrl.data.reader", "def f():\n    import mrl.trainer"),
        ("mrl.types", "import moe"),
        ("mrl.algorithms.gspo", "from parallel.dims import ParallelDims"),
        ("mrl.rollout.base", "import moe.align"),
        ("mrl.trainer", "import megatron.core"),
        ("moe.align", "from megatron import core"),
        ("parallel.model", "from mrl.rollout import base"),
        ("parallel.model", "import sglang"),
    ],
)
def test_import_rules_catch(module, code):
    assert list(broken_import_rules(module, ast.parse(code)))


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("mrl.trainer", "from mrl import rollout; import parallel.model, moe"),
        ("moe.replay", "import megatron.core; from mrl.types import Prompt"),
        ("mrl.rollout.sglang", "import sglang; from moe.trace import decode"),
        ("mrl.kernels.loss", "from mrl import _C"),
        ("parallel.model", "from moe import align; import megatron"),
    ],
)
def test_import_rules_allow(module, code):
    assert not list(broken_import_rules(module, ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "pickle.loads(b)",
        "from pickle import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "eval('1')",
        "exec(code)",
        "subprocess.run(c, shell=True)",
        "os.system(c)",
        "numpy.load(f, allow_pickle=True)",
        "serve(host='0.0.0.0')",
        "load(trust_remote_code=True)",
    ],
)
def test_security_rules_catch(code):
    assert list(broken_security_rules(ast.parse(code)))


def test_security_rules_allow():
    code = "pickle.dumps(x); model.eval(); torch.load(f, weights_only=True); re.compile('a')"
    assert not list(broken_security_rules(ast.parse(code)))
