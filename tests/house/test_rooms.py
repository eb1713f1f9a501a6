"""The rules that hold over the source itself: who imports whom, and what is never called."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for room in ("mrl", "moe", "parallel", "benchmarks", "studies", "launch")
                 for p in (ROOT / room).rglob("*.py"))  # fmt: skip
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_LINES = 350

BASE = {
    *("mrl.version", "mrl.errors", "mrl.sampling_mask", "mrl.shared_prefixes", "mrl.types"),
    *("mrl.system", "mrl.config"),
}
"""Every room below them in `ROOMS` may import these."""
ROOMS: dict[str, set[str]] = {
    "mrl.version": set(),
    "mrl.errors": set(),
    "mrl.sampling_mask": set(),
    "mrl.shared_prefixes": set(),
    "mrl.types": set(),
    "mrl.system": set(),
    "mrl.config": set(),
    "mrl.web": set(),
    "mrl.kernels": {"mrl._C"},
    "mrl.quantization": {"mrl.kernels"},
    "mrl.algorithms": {"mrl.kernels"},
    "moe": set(),
    "mrl.rewards": {"mrl.web"},
    "mrl.environments": {"mrl.rewards"},
    "mrl.data": set(),
    "mrl.engines": {"moe.trace", "mrl.kernels", "mrl.quantization"},
    "mrl.scheduling": set(),
    "parallel": {"mrl.kernels", "mrl.quantization", "moe"},
    "mrl.planner": {
        *("moe.route_rows", "mrl.kernels.vp_logprob", "mrl.kernels.weight_delta"),
        "parallel.architectures",
        "mrl.algorithms",
        *(
            "parallel.dims",
            "parallel.expected_tensors",
            "parallel.hf_config",
            "parallel.lora.rules",
            "parallel.owners",
        ),
    },
    "mrl.run": {"moe.trace", "parallel.checkpoint"},
    "mrl.trackers": {"mrl.run"},
    "mrl.exchange": {"moe", "parallel"},
    "mrl.weight_sync": {"mrl.engines", "mrl.kernels", "mrl.quantization", "mrl.run", "parallel"},
    "mrl.preflight": {
        *("mrl.algorithms", "mrl.data", "mrl.environments", "mrl.planner", "mrl.rewards"),
        *("mrl.engines", "mrl.run", "mrl.trackers", "mrl.weight_sync", "parallel"),
    },
    "mrl.diagnosis": {"moe", "mrl.algorithms", "mrl.quantization", "mrl.run", "parallel"},
    "mrl.learn": {
        *("mrl.algorithms", "mrl.data", "mrl.diagnosis", "mrl.exchange", "mrl.kernels"),
        *("mrl.planner", "mrl.run", "moe", "parallel"),
    },
    "mrl.collect": {
        *("mrl.algorithms", "mrl.data", "mrl.environments", "mrl.exchange", "mrl.preflight"),
        *("mrl.rewards", "mrl.engines", "mrl.run", "mrl.web", "moe", "parallel"),
    },
    "mrl.engine_pool": {
        *("mrl.algorithms", "mrl.collect", "mrl.data", "mrl.environments", "mrl.exchange"),
        *("mrl.preflight", "mrl.rewards", "mrl.engines", "mrl.run", "mrl.scheduling"),
        *("mrl.weight_sync", "mrl.web", "parallel"),
    },
    "mrl.trainer": {
        *("mrl.algorithms", "mrl.collect", "mrl.data", "mrl.diagnosis", "mrl.engine_pool"),
        *("mrl.exchange", "mrl.learn", "mrl.preflight", "mrl.run", "mrl.trackers", "parallel"),
    },
    "mrl.service": {
        *("mrl.algorithms", "mrl.collect", "mrl.data", "mrl.diagnosis", "mrl.engine_pool"),
        *("mrl.exchange", "mrl.learn", "mrl.preflight", "mrl.rewards", "mrl.engines", "mrl.run"),
        *("mrl.trainer", "mrl.weight_sync", "mrl.web", "parallel"),
    },
    "mrl.view": {"mrl.diagnosis", "mrl.run", "mrl.service", "mrl.web", "parallel"},
    "mrl.client": {"mrl.service"},
    "mrl.tinker": {"mrl.run", "mrl.service", "mrl.web", "parallel"},
    "mrl.launch": {"mrl.run"},
    "mrl.watch": {"mrl.run"},
    "mrl.drill": {"mrl.run", "parallel.checkpoint"},
    "mrl.jobs": {
        *("mrl.engine_pool", "mrl.engines", "mrl.learn", "mrl.preflight", "mrl.run"),
        *("mrl.trainer", "mrl.watch", "parallel"),
    },
    "mrl.api": {"mrl.jobs", "mrl.run", "parallel"},
    "mrl.toy_model": set(),
    "mrl.commands": {
        *("mrl.algorithms", "mrl.data", "mrl.diagnosis", "mrl.drill", "mrl.engine_pool"),
        *("mrl.engines", "mrl.jobs", "mrl.learn", "mrl.planner", "mrl.preflight", "mrl.rewards"),
        *("mrl.run", "mrl.service", "mrl.tinker", "mrl.toy_model", "mrl.trainer", "mrl.view"),
        *("mrl.watch", "mrl.web"),
        "parallel",
    },
    "mrl.cli": {"mrl.commands", "mrl.jobs", "mrl.run"},
    "mrl.__main__": {"mrl.cli"},
}
"""The modules of this project that a room may import in addition to itself and BASE. A room may import
only rooms above it in this table, so there is no cycle of rooms. The package `mrl` itself is in no
room: its __init__.py re-exports names of `mrl.api`, and no room imports it."""


def within(module, package):
    return module == package or module.startswith(package + ".")


def nodes_of(code):
    return list(ast.walk(ast.parse(code)))


@cache
def looked_at(path):
    """Return (the broken security rules, the imported names) of a file. Plug-ins of SGLang stand in for
    other packages; they are rooms of their own, whose imports have no rules."""
    nodes = nodes_of(path.read_text())
    imported = () if "plugins" in path.parts else tuple(imports(nodes))
    return tuple(broken_security_rules(nodes)), imported


def imported_by(path):
    return looked_at(path)[1]


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(nodes):
    """Yield dotted names; `from a import b` gives `a.b` if that is a module, and `a` otherwise."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if alias.name == "_C" or is_module(inner) else node.module


@cache
def is_module(name):
    target = ROOT / name.replace(".", "/")
    return target.is_dir() or target.with_suffix(".py").is_file()


def broken_import_rules(module, names):
    room = next((name for name in ROOMS if within(module, name)), None)
    for name in names:
        if within(name, "megatron") and not (within(module, "parallel") or module == "moe.replay"):
            yield f"{module} imports {name}: Megatron is for parallel/ and moe/replay.py"
        if within(name, "sglang") and not within(module, "mrl.engines"):
            yield f"{module} imports {name}: SGLang is for mrl/engines/"
        own = name.split(".")[0] in ("mrl", "moe", "parallel")
        if room is None or not own or within(name, room):
            continue
        order = list(ROOMS)
        allowed = ROOMS[room] | {base for base in BASE if order.index(base) < order.index(room)}
        if not any(within(name, each) for each in allowed):
            yield f"{module} imports {name}: not among {sorted(allowed)}"


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


UNPICKLERS = {f"{module}.{name}" for module in ("pickle", "dill", "cloudpickle", "marshal", "shelve")
              for name in ("load", "loads", "open", "Unpickler")}  # fmt: skip


def broken_security_rules(nodes):
    for node in nodes:
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
        found = list(looked_at(path)[0])
        found += broken_import_rules(module_of(path), imported_by(path))
        broken += [f"{path.relative_to(ROOT)}: {rule}" for rule in found]
    assert not broken


@cache
def module_graph():
    """Return the names that each module of this project imports, inside its functions and under
    TYPE_CHECKING too."""
    paths = [path for path in SOURCES if "plugins" not in path.parts]
    return {module_of(path): set(imported_by(path)) for path in paths}


def reachable(graph, start):
    """Return all names that the module `start` imports, or that those import in turn."""
    found, waiting = set(), [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def test_no_cycle_of_modules():
    graph = module_graph()
    below = {module: reachable(graph, module) for module in graph}
    in_cycle = sorted(module for module in graph if module in below[module])
    cycles = {
        tuple(each for each in in_cycle if each in below[module] and module in below[each])
        for module in in_cycle
    }
    assert not cycles


def test_the_planner_needs_no_megatron():
    graph = module_graph()
    for module in graph:
        if within(module, "mrl.planner"):
            found = [name for name in reachable(graph, module) if within(name, "megatron")]
            assert not found, f"{module} needs {found}"


def test_no_benchmark_needs_a_study():
    upward = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "benchmarks").rglob("*.py")
        if any(within(name, "studies") for name in imported_by(path))
    ]
    assert not upward


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
        ("mrl.engines.base", "import moe.align"),
        ("mrl.engine_pool.local", "from mrl.learn import batching"),
        ("mrl.learn.learner", "from mrl.collect.base import Collector"),
        ("mrl.trainer", "import megatron.core"),
        ("moe.align", "from megatron import core"),
        ("parallel.model", "from mrl.engines import base"),
        ("parallel.model", "import sglang"),
        ("mrl.system.disk", "from mrl.config import Recipe"),
        ("mrl.planner.cost", "from parallel.mesh import Mesh"),
        ("mrl.api.runs", "import mrl.commands.train"),
        ("parallel.model", "from mrl import __version__"),
    ],
)
def test_import_rules_catch(module, code):
    assert list(broken_import_rules(module, imports(nodes_of(code))))


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("mrl.trainer", "from mrl import collect; import parallel.model"),
        ("moe.replay", "import megatron.core; from mrl.types import Prompt"),
        ("mrl.engines.sglang.engine", "import sglang; from moe.trace import decode"),
        ("mrl.kernels.loss", "from mrl import _C"),
        ("parallel.model", "from moe import align; import megatron"),
        ("parallel.model", "from mrl.version import __version__"),
        ("mrl.planner.cost", "from parallel.dims import ParallelDims"),
    ],
)
def test_import_rules_allow(module, code):
    assert not list(broken_import_rules(module, imports(nodes_of(code))))


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
    assert list(broken_security_rules(nodes_of(code)))


def test_security_rules_allow():
    code = "pickle.dumps(x); model.eval(); torch.load(f, weights_only=True); re.compile('a')"
    assert not list(broken_security_rules(nodes_of(code)))
