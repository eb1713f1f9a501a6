"""The rules that hold over the source itself: who imports whom, and what is never called."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for room in ("mrl", "moe", "parallel", "benchmarks", "launch")
                 for p in (ROOT / room).rglob("*.py"))  # fmt: skip
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_LINES = 350

BASE = {"mrl", "mrl.types", "mrl.errors", "mrl.config", "mrl.sampling_mask", "mrl.system"}
"""Every room may import these; `mrl` itself holds the version and finds the names of `mrl.api`."""
ROOMS: dict[str, set[str]] = {
    "mrl.errors": set(),
    "mrl.sampling_mask": set(),
    "mrl.types": set(),
    "mrl.system": set(),
    "mrl.config": set(),
    "mrl.kernels": {"mrl._C"},
    "mrl.algorithms": {"mrl.kernels"},
    "moe": {"mrl.kernels"},
    "mrl.rewards": set(),
    "mrl.environments": {"mrl.rewards"},
    "mrl.data": set(),
    "mrl.rollout": {"moe.trace", "mrl.kernels"},
    "parallel": {"mrl.kernels", "moe"},
    "mrl.run": {"moe.trace", "parallel.checkpoint"},
    "mrl.trackers": {"mrl.run"},
    "mrl.exchange": {"moe", "parallel"},
    "mrl.preflight": {
        *("mrl.algorithms", "mrl.data", "mrl.environments", "mrl.rewards", "mrl.rollout"),
        *("mrl.run", "mrl.trackers", "parallel"),
    },
    "mrl.diagnosis": {"moe", "mrl.algorithms", "mrl.run", "parallel"},
    "mrl.learn": {
        *("mrl.algorithms", "mrl.data", "mrl.diagnosis", "mrl.exchange", "mrl.kernels"),
        *("mrl.run", "moe", "parallel"),
    },
    "mrl.collect": {
        *("mrl.algorithms", "mrl.data", "mrl.environments", "mrl.exchange", "mrl.preflight"),
        *("mrl.rewards", "mrl.rollout", "mrl.run", "moe", "parallel"),
    },
    "mrl.disaggregated": {
        *("mrl.algorithms", "mrl.collect", "mrl.data", "mrl.environments", "mrl.exchange"),
        *("mrl.preflight", "mrl.rewards", "mrl.rollout", "mrl.run", "parallel"),
    },
    "mrl.trainer": {
        *("mrl.algorithms", "mrl.collect", "mrl.data", "mrl.diagnosis", "mrl.disaggregated"),
        *("mrl.exchange", "mrl.learn", "mrl.preflight", "mrl.run", "mrl.trackers", "parallel"),
    },
    "mrl.tenants": {
        *("mrl.algorithms", "mrl.collect", "mrl.data", "mrl.diagnosis", "mrl.disaggregated"),
        *("mrl.exchange", "mrl.learn"),
        *("mrl.preflight", "mrl.rewards", "mrl.rollout", "mrl.run", "mrl.trainer", "parallel"),
    },
    "mrl.view": {"mrl.diagnosis", "mrl.run", "mrl.tenants", "parallel"},
    "mrl.client": {"mrl.tenants"},
    "mrl.launch": {"mrl.run"},
    "mrl.watch": {"mrl.run"},
    "mrl.drill": {"mrl.run", "parallel.checkpoint"},
    "mrl.toy_model": set(),
    "mrl.commands": {
        *("mrl.algorithms", "mrl.data", "mrl.diagnosis", "mrl.drill", "mrl.learn"),
        *(
            "mrl.disaggregated",
            "mrl.preflight",
            "mrl.rewards",
            "mrl.rollout",
            "mrl.run",
            "mrl.tenants",
            "mrl.toy_model",
            "mrl.trainer",
            "mrl.view",
            "mrl.watch",
        ),
        "parallel",
    },
    "mrl.api": {"mrl.commands", "mrl.run", "parallel"},
    "mrl.cli": {"mrl.commands", "mrl.run"},
    "mrl.__main__": {"mrl.cli"},
}
"""What a room may import of the project beside BASE and itself, from the ground floor up: a room may
name only rooms above it in this table, so no arrow runs up and there is no circle."""


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
        base = name == "mrl" or any(within(name, allowed) for allowed in BASE - {"mrl"})
        if room is None or not own or base or within(name, room):
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


def test_arrows_point_down():
    order = list(ROOMS)
    for number, (room, allowed) in enumerate(ROOMS.items()):
        below = [*order[:number], "mrl._C"]
        up = [name for name in allowed if not any(within(name, other) for other in below)]
        assert not up, f"{room} may not import {up}: they are not below it"


def test_every_file_is_in_a_room():
    homeless = [
        module
        for path in SOURCES
        if (module := module_of(path)).split(".")[0] in ("mrl", "moe", "parallel")
        and module != "mrl"
        and not any(within(module, room) for room in ROOMS)
    ]
    assert not homeless


def test_sources_keep_the_rules():
    broken = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        found = list(broken_security_rules(tree))
        if "plugins" not in path.parts:  # these stand in for other packages, rooms of their own
            found += broken_import_rules(module_of(path), tree)
        broken += [f"{path.relative_to(ROOT)}: {rule}" for rule in found]
    assert not broken


def test_files_stay_short():
    lengths = {path: len(path.read_text().splitlines()) for path in [*SOURCES, *TESTS]}
    assert not {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > MAX_LINES}


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("mrl.data.reader", "from mrl.rewards import base"),
        ("mrl.data.reader", "from mrl import rewards"),
        ("mrl.data.reader", "def f():\n    import mrl.trainer"),
        ("mrl.types", "import moe"),
        ("mrl.algorithms.gspo", "from parallel.dims import ParallelDims"),
        ("mrl.rollout.base", "import moe.align"),
        ("mrl.collect.live", "from mrl.learn import batching"),
        ("mrl.learn.learner", "from mrl.collect.base import Collector"),
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
        ("mrl.trainer", "from mrl import collect; import parallel.model"),
        ("moe.replay", "import megatron.core; from mrl.types import Prompt"),
        ("mrl.rollout.sglang.engine", "import sglang; from moe.trace import decode"),
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
