"""The versions of the packages that mrl depends on, and what each version implies on this machine.

A version does not show that a package works. So packages with compiled parts are also imported, each
in a separate process, because a broken library may crash the process.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mrl.system.releases import newest, numbers, refusal

TESTED_TORCH = "2.13"
"""The version of torch that the tests of this repository ran with. Other versions get a warning."""
IMPORT_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Compiled:
    """A package with compiled parts."""

    module: str
    """The module that is imported to see whether the package works."""
    implies: Callable[[str], str]
    """Takes the version of a package that works. Returns a text that says what this version means
    for mrl."""
    otherwise: str
    """A text that says what follows if the package does not work or is not installed."""
    is_optional: bool = True
    """Whether `version_rows` leaves the package out if it is not installed."""


def version_rows(
    installed: Callable[[str], str | None] | None = None,
    python: str | None = None,
    failure: Callable[[str], str | None] | None = None,
) -> list[tuple[str, str, str]]:
    """Return (package, version, text) for each package, for the terminal. The text says what the
    version means for mrl.

    `installed` returns a package's version, or None if it is not installed. `python` is Python's
    version. `failure` returns the error from importing a module, as one line, or None if the module can
    be imported. By default, all three arguments describe this environment.
    """
    find = installed or installed_version
    here = python or platform.python_version()
    rows = [("python", here, _python(here))]
    for name, implies in RULES.items():
        version = find(name)
        rows.append((name, version or "(not installed)", implies(version)))
    there = {name: version for name in COMPILED if (version := find(name)) is not None}
    with ThreadPoolExecutor() as pool:
        modules = [COMPILED[name].module for name in there]
        failures = dict(zip(there, pool.map(failure or import_failure, modules), strict=True))
    for name, package in COMPILED.items():
        if name not in there:
            if not package.is_optional:
                rows.append((name, "(not installed)", package.otherwise))
        elif (error := failures[name]) is not None:
            text = f"warning: {package.module} cannot be imported ({error}): {package.otherwise}"
            rows.append((name, there[name], text))
        else:
            rows.append((name, there[name], package.implies(there[name])))
    return rows


def import_failure(module: str) -> str | None:
    """Return the error from importing `module` in a new process, as one line; None if it succeeds."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {IMPORT_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
    return lines[-1][:200] if lines else f"the process ended with {done.returncode}"


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python(version: str) -> str:
    if numbers(version) < (3, 11):
        return "warning: mrl needs 3.11 or newer"
    if numbers(version) < (3, 12):
        return "megatron-core 0.16.1 is the last for 3.11; 0.17 and later need 3.12"
    return "supported"


def _megatron(version: str | None) -> str:
    if version is None:
        return "warning: training needs it; install the locked requirements"
    if text := refusal("megatron-core", version):
        return f"warning: {text}"
    return (
        "tested; wrong there and replaced by mrl: batched p2p with virtual stages, latent "
        "attention and balancing losses with tensor parallelism, its optimizer offload"
    )


def _torch(version: str | None) -> str:
    if version is None:
        return "warning: nothing runs without it"
    if numbers(version) < (2, 11):
        return "warning: older than 2.11, which the kernels' op registration needs"
    if not version.startswith(TESTED_TORCH):
        return f"warning: tests ran with {TESTED_TORCH}"
    return "tested" + (", CPU build: no GPU is used" if "+cpu" in version else "")


def _transformer_engine(version: str) -> str:
    from parallel.implementation import OLDEST_BATCH_INVARIANT, OLDEST_TRANSFORMER_ENGINE

    if numbers(version) < OLDEST_TRANSFORMER_ENGINE:
        oldest = ".".join(map(str, OLDEST_TRANSFORMER_ENGINE))
        return f"warning: older than {oldest}; mrl's own layers are used, which need none"
    words = "its layers on GPUs, with fused rope and permutation"
    if numbers(version) < OLDEST_BATCH_INVARIANT:
        return f"{words}; rollout.true_on_policy needs {'.'.join(map(str, OLDEST_BATCH_INVARIANT))}"
    return words


def _apex(version: str) -> str:
    if import_failure("fused_weight_gradient_mlp_cuda") is None:
        return "NVIDIA's: gradients are accumulated by the products themselves on GPUs"
    return (
        "NVIDIA's, without fused_weight_gradient_mlp_cuda: build it with APEX_CPP_EXT=1 and "
        "APEX_CUDA_EXT=1 for fused gradient accumulation"
    )


def _sglang(version: str | None) -> str:
    if version is None:
        return "warning: no rollout engine; only debug.load_rollouts can train"
    if text := refusal("sglang", version):
        return f"warning: {text}"
    if numbers(version) != numbers(newest("sglang")):
        return f"supported; the tests run {newest('sglang')}"
    return "tested: rollouts with captured routes"


RULES: dict[str, Callable[[str | None], str]] = {
    "megatron-core": _megatron,
    "torch": _torch,
    "sglang": _sglang,
}
COMPILED = {
    "transformer-engine": Compiled(
        "transformer_engine.pytorch",
        _transformer_engine,
        "mrl's own layers are used, which need none",
        is_optional=False,
    ),
    # The index has another project of this name: only NVIDIA's has this module.
    "apex": Compiled(
        "apex.multi_tensor_apply",
        _apex,
        "Megatron does without NVIDIA's apex (docs/gpu.md says how it is built); the package that the "
        "index calls apex is another project",
    ),
    "flash-attn": Compiled(
        "flash_attn", lambda _: "TransformerEngine may choose it", "TransformerEngine uses cuDNN's"
    ),
    "deep-ep": Compiled(
        "deep_ep",
        lambda _: "megatron.moe_token_dispatcher_type=flex can be used",
        "the flex dispatcher cannot be used",
    ),
    "torch-memory-saver": Compiled(
        "torch_memory_saver",
        lambda _: "the engine can give its memory back",
        "no colocated engine on GPUs: it cannot give its memory back",
    ),
    "sglang-kernel": Compiled(
        "sgl_kernel", lambda _: "SGLang's kernels", "SGLang cannot start on a GPU"
    ),
}
