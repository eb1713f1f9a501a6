"""This module describes the machine and the versions behind a result, in words."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import mrl


def describe(device: torch.device, packages: Sequence[str]) -> dict[str, str]:
    """Return what a reader needs to judge the figures; packages that are not installed are named so."""
    versions = [f"mrl {mrl.__version__}", f"Python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} not installed")
    return {
        "machine": _gpu(device) if device.type == "cuda" else _cpu(),
        "versions": ", ".join(versions),
    }


def _cpu() -> str:
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model}, {os.cpu_count()} cores, {capability}"


def _gpu(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    size = properties.total_memory / 2**30
    return f"{properties.name}, {size:.0f} GiB, CUDA {torch.version.cuda}"
