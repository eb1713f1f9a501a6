"""The versions of what mrl stands on, and what each implies here; read without importing any."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable

TESTED_TORCH = "2.13"
"""What the tests of this repository ran with; others get a plain warning."""


def version_rows(
    installed: Callable[[str], str | None] | None = None, python: str | None = None
) -> list[tuple[str, str, str]]:
    """(package, version, what it implies) for the terminal.

    `installed` gives a package's version or None, by default this environment's.
    """
    find = installed or installed_version
    here = python or platform.python_version()
    rows = [("python", here, _python(_numbers(here), find("megatron-core")))]
    for name, implies in RULES.items():
        version = find(name)
        rows.append((name, version or "(not installed)", implies(version)))
    return rows


def installed_version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """`0.16.1rc2+cu12` -> (0, 16, 1): the leading digits of the first three parts."""
    found = [re.match(r"\d+", part) for part in version.split(".")[:3]]
    return tuple(int(match[0]) for match in found if match)


def _python(numbers: tuple[int, ...], megatron: str | None) -> str:
    if numbers < (3, 11):
        return "warning: mrl needs 3.11 or newer"
    if numbers < (3, 12):
        return "megatron-core 0.16.1 is the last for 3.11; 0.17 and later need 3.12"
    if megatron is not None and _numbers(megatron) < (0, 17):
        return "megatron-core 0.17 and later could be installed; 0.16.1 is what is tested"
    return "any supported megatron-core"


def _megatron(version: str | None) -> str:
    if version is None:
        return "warning: training needs it; install the locked requirements"
    numbers = _numbers(version)
    if numbers < (0, 16, 1):
        return (
            "warning: older than 0.16.1; routing replay and process group arguments may be missing"
        )
    if numbers < (0, 17):
        return (
            "tested; wrong there and replaced by mrl: batched p2p with virtual stages, latent "
            "attention and balancing losses with tensor parallelism, its optimizer offload"
        )
    if numbers == (0, 19, 2):
        return (
            "not in the lock; the layout, bf16 and policy tests passed once with its source; needs "
            "Python 3.12; GroupedMLP and moe_use_legacy_grouped_gemm are gone and were not used"
        )
    if numbers < (0, 19, 2):
        return "warning: untested; 0.16.1 and 0.19.2, on either side of it, passed the layout tests"
    return "warning: newer than any version that was tried; run the layout tests first"


def _torch(version: str | None) -> str:
    if version is None:
        return "warning: nothing runs without it"
    if _numbers(version) < (2, 11):
        return "warning: older than 2.11, which the kernels' op registration needs"
    if not version.startswith(TESTED_TORCH):
        return f"warning: tests ran with {TESTED_TORCH}"
    return "tested" + (", CPU build: no GPU is used" if "+cpu" in version else "")


def _transformer_engine(version: str | None) -> str:
    if version is None:
        return "local layers, experts one after the other (no grouped products)"
    if _numbers(version) < (2, 6):
        return "warning: older than 2.6; set model.transformer_impl=local or update"
    return "grouped products of experts and fused layers on GPUs"


def _apex(version: str | None) -> str:
    if version is None:
        return "torch's Adam; same numbers, slower on GPUs"
    return "fused Adam on GPUs"


def _sglang(version: str | None) -> str:
    if version is None:
        return "warning: no rollout engine; only debug.load_rollouts can train"
    if _numbers(version) < (0, 5, 12):
        return "warning: older than 0.5.12; routes (r3) and level-2 sleep may be missing"
    return "rollouts with captured routes"


RULES: dict[str, Callable[[str | None], str]] = {
    "megatron-core": _megatron,
    "torch": _torch,
    "transformer-engine": _transformer_engine,
    "apex": _apex,
    "sglang": _sglang,
}
