"""The parts of run.py that ask what is there: the build, the versions, the memory beside the plan."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane import extension
from benchmarks.gpu_lane.catalog import NO_FIGURES
from benchmarks.gpu_lane.children import ROOT, run_child
from benchmarks.gpu_lane.parts import RECIPE, model_folder, note, train_overrides
from benchmarks.gpu_lane.unpack import EXTENSION

GIB = 2**30
PROMPT_LEN = 4
"""The longest prompt that `train_overrides` writes."""
READ_IN = {"awake": "rollout", "train": "train"}
"""Phases of mrl.system.memory_watch, each with the plan's phase in which it is read."""


def build(folder: Path, device: str) -> dict[str, Any]:
    """Provide `mrl._C`, on a GPU with its kernels; then the model of all parts, and the device."""
    start = time.perf_counter()
    how = provide_extension() if device == "cuda" else "there"
    seconds = time.perf_counter() - start
    note(extension=how, build_s=round(seconds, 1))
    import torch  # before the extension, which wants its OpenMP

    from parallel.versions import version_rows

    compiled = importlib.import_module("mrl._C")
    rows = {name: [version, implies] for name, version, implies in version_rows()}
    for name, (version, implies) in rows.items():
        print(f"{name} {version}: {implies}")
    start = time.perf_counter()
    model_folder(folder, device)
    note(has_cuda=compiled.has_cuda, versions=rows, model_s=round(time.perf_counter() - start, 1))
    if device == "cpu":
        return {"says": f"torch {torch.__version__}, extension there, CPU only"}
    assert compiled.has_cuda, "mrl._C was built without its GPU kernels"
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    facts = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "free_bytes": free,
        "total_bytes": total,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, importlib.import_module("torch.cuda.nccl").version())),
        "cores": os.cpu_count(),
    }
    note(device=facts, **speeds())
    says = f"extension {how} in {seconds:.0f} s; {properties.name}, {free / GIB:.1f} GiB free"
    return {"says": f"{says}, torch {torch.__version__}"}


def provide_extension() -> str:
    """Put `mrl._C` into place: the one of the pieces where it fits, or else compiled; returns which."""
    refusal = "there are no pieces"
    if EXTENSION in os.environ:
        refusal = extension.take(Path(os.environ[EXTENSION]), ROOT / "mrl")
        if refusal is None:
            return "taken from the pieces"
    run_child(["setup.py", "--quiet", "build_ext", "--inplace"], {"MRL_CUDA": "1"})
    return f"compiled here, for {refusal}"


def speeds() -> dict[str, float]:
    """Measure the two ceilings of this device: a copy's bytes per second (read and written), bf16
    FLOP/s.
    """
    import torch

    def median_s(act: Any) -> float:
        times = []
        for number in range(13):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            act()
            end.record()
            torch.cuda.synchronize()
            if number >= 3:
                times.append(begin.elapsed_time(end) / 1e3)
        return sorted(times)[len(times) // 2]

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / median_s(lambda: target.copy_(source))
    return {"copy_bytes_per_s": copy, "bf16_flops": 2 * 8192**3 / median_s(lambda: a @ b)}


def memory_plan(folder: Path, device: str) -> dict[str, Any]:
    """Bytes on the device in the phases of the last step of `train`, beside what the plan says."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    planned = planned_bytes(train_overrides(folder, device), total)
    measured = json.loads((folder / "state.json").read_text()).get("train", {}).get("figures", {})
    assert "steps" in measured, NO_FIGURES
    last = measured["steps"][-1]
    note(planned=planned, measured=last)
    lines, over = compare(planned, last)
    assert lines, f"no phase of {sorted(last)} is in the plan"
    assert not over, "; ".join(over)
    return {"says": "; ".join(lines)}


def planned_bytes(overrides: list[str], device_bytes: int) -> dict[str, dict[str, int]]:
    """Return the planned bytes on one GPU, by phase and kind, of the toy recipe with `overrides`."""
    from mrl.commands.scaling_plan import plan_workload
    from mrl.config import load_recipe
    from mrl.planner.hardware import HARDWARE
    from mrl.planner.roles import all_phases
    from mrl.planner.shape import read_shape
    from parallel.dims import ParallelDims
    from parallel.hf_config import read_config

    recipe = load_recipe(RECIPE, overrides)
    config = read_config(Path(recipe.model.path))
    shape = read_shape(config)
    dims = ParallelDims.create(recipe.parallel, 1)
    work = plan_workload(recipe, shape, 1, PROMPT_LEN, config.get("max_position_embeddings"))
    gpu = dataclasses.replace(HARDWARE["h100"], memory_bytes=device_bytes)
    return {
        phase.name: {row.name: row.num_bytes for row in phase.device}
        for phase in all_phases(shape, dims, work, gpu)
    }


def compare(
    planned: dict[str, dict[str, int]], last: dict[str, float]
) -> tuple[list[str], list[str]]:
    """One line a phase that is both planned and in the metrics of a step, and those that took more."""
    lines, over = [], []
    for phase, name in READ_IN.items():
        used = last.get(f"memory/{phase}/device_used_bytes")
        if used is None:
            continue
        most = sum(planned[name].values())
        lines.append(f"{phase} {used / GIB:.2f} of {most / GIB:.2f} GiB planned")
        if used > most:
            over.append(lines[-1])
    return lines, over
