"""The parts of `make gpu-stack`: what is run with the installed GPU stack, on the CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compat.__main__ import lacks
from benchmarks.gpu_environment.environment import Environment

RECIPES = "launch/recipes"
LIMIT_S = 900.0
"""Seconds that a command may take."""
SERVICE = """\
model: {path: toy/model, dtype: float32}
rollout: {batch_invariant: true, context_len: 128, max_total_tokens: 4096}
lora: {max_rank: 8, experts: [per_expert]}
output_dir: runs/service
"""
SMALL = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "lora.rank=8")


@dataclass(frozen=True)
class Part:
    """One part: it returns what it found in a few words, and raises RuntimeError where it fails."""

    name: str
    tells: str
    run: Callable[[Environment], str]


def versions(environment: Environment) -> str:
    """The installed versions are those of requirements/gpu.txt, and `mrl check` accepts them."""
    text = (environment.work / "requirements" / "gpu.txt").read_text()
    pins = [line for line in text.splitlines() if "==" in line]
    program = (
        "import json, sys; from importlib.metadata import version;"
        "from packaging.requirements import Requirement;"
        "pins = [Requirement(text) for text in sys.argv[1:]];"
        "pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()];"
        "print(json.dumps({pin.name: [version(pin.name), str(pin.specifier)] for pin in pins}))"
    )
    installed = json.loads(_python(environment, "-c", program, *pins))
    other = {name: it for name, it in installed.items() if f"=={it[0].split('+')[0]}" != it[1]}
    if other:
        raise RuntimeError(f"installed, and pinned in requirements/gpu.txt: {other}")
    _toy_model(environment)
    _mrl(environment, "check", f"{RECIPES}/toy_moe.yaml", "--versions")
    return ", ".join(f"{name} {version}" for name, (version, _) in installed.items())


def imports(environment: Environment) -> str:
    """Every module of mrl can be imported."""
    return _probe(environment, "imports")


def names(environment: Environment) -> str:
    """Every private name is in the installed SGLang and Megatron, looked up after their import and in
    their source."""
    found = _probe(environment, "names")
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(_python(environment, "-c", program).strip())
    for package in ("sglang", "megatron-core"):
        program = f"from importlib.metadata import version; print(version({package!r}))"
        release = _python(environment, "-c", program).strip()
        if lacking := list(lacks(package, release, site)):
            raise RuntimeError("\n".join(lacking))
    return found


def server_args(environment: Environment) -> str:
    """SGLang takes the arguments of an engine on GPUs."""
    return _tests(environment, "tests/rollout/test_gpu_server_args.py")


def kernels(environment: Environment) -> str:
    """The kernels' tests on the CPU."""
    # These three read and compile csrc/ themselves.
    own = ("test_cuda_emulated.py", "test_emulator.py", "test_cuda_source.py")
    ignored = [word for name in own for word in ("--ignore", f"tests/kernels/{name}")]
    return _tests(environment, "tests/kernels", *ignored)


def demo(environment: Environment) -> str:
    """The first three steps of the demo, with a real engine."""
    return _train(environment, "toy_moe.yaml", "train.num_steps=3")


def lora(environment: Environment) -> str:
    """Two steps of the LoRA recipe: the second one rolls out with the updated adapter."""
    return _train(environment, "toy_lora.yaml", "train.num_steps=2")


def service(environment: Environment) -> str:
    """A service of two tenants, one step each."""
    _toy_model(environment)
    (environment.work / "service.yaml").write_text(SERVICE)
    folder, names = environment.work / "runs" / "service", ("ann", "bob")
    with environment.beside(str(environment.site / "mrl"), "serve", "service.yaml") as served:
        served.until((folder / "control.sock").exists, LIMIT_S)
        for name in names:
            recipe = (f"{RECIPES}/toy_lora.yaml", "--name", name, "--service", "runs/service")
            words = (*SMALL, "train.num_steps=1", f"output_dir=runs/{name}")
            _mrl(environment, "tenants", "add", *recipe, *words)

        def all_done() -> bool:
            listed = _mrl(environment, "tenants", "list", "--service", "runs/service")
            if "paused" in listed:
                raise RuntimeError(listed)
            return len(re.findall(r"\bdone\b", listed)) == len(names)

        served.until(all_done, LIMIT_S)
    files = [environment.work / "runs" / name / "metrics.jsonl" for name in names]
    if (steps := [len(file.read_text().splitlines()) for file in files]) != [1, 1]:
        raise RuntimeError(f"steps of the tenants: {steps}, expected 1 each")
    return "2 tenants, 1 step each"


PARTS = tuple(
    Part(run.__name__, (run.__doc__ or "").split("\n\n")[0], run)
    for run in (versions, imports, names, server_args, kernels, demo, lora, service)
)


def _train(environment: Environment, recipe: str, *overrides: str) -> str:
    folder = environment.work / "runs" / recipe.removesuffix(".yaml")
    _toy_model(environment)
    words = (*overrides, f"output_dir={folder}")
    _mrl(environment, "train", f"{RECIPES}/{recipe}", *words)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    worst = max(row["mismatch/logprob_abs_max"] for row in rows)
    return (
        f"{len(rows)} steps; largest difference of log-probs between engine and trainer {worst:.2g}"
    )


def _toy_model(environment: Environment) -> None:
    if not (environment.work / "toy" / "model").exists():
        _mrl(environment, "toy-model", "toy/model")


def _probe(environment: Environment, what: str) -> str:
    program = str(Path(__file__).with_name("probe.py"))
    answer = json.loads(_python(environment, program, what).splitlines()[-1])
    if answer["failed"]:
        raise RuntimeError("\n".join(f"{name}: {why}" for name, why in answer["failed"].items()))
    extras = f"; need mrl[tasks]: {', '.join(answer['extras'])}" if answer["extras"] else ""
    return f"{answer['passed']} passed{extras}"


def _tests(environment: Environment, *arguments: str) -> str:
    command = ("-m", "pytest", "-q", "-m", "not release and not gpu", "-p", "no:cacheprovider")
    last = _python(environment, *command, *arguments).splitlines()[-1]
    return re.sub(r" in [\d.]+s.*", "", last).strip("= ")


def _mrl(environment: Environment, *arguments: str) -> str:
    return environment.run(str(environment.site / "mrl"), *arguments, limit_s=LIMIT_S)


def _python(environment: Environment, *arguments: str) -> str:
    return environment.run(str(environment.site / "python"), *arguments, limit_s=LIMIT_S)
