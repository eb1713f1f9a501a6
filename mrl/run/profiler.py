"""Writes traces of a step with torch.profiler, on the ranks in `profile.ranks`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mrl.config.profiling import ProfileConfig


def profile_folder(root: Path, step: int) -> Path:
    """Return the absolute path of the folder for the traces of a step, in the run folder `root`."""
    return root.absolute() / "profile" / f"step_{step:06d}"


@contextmanager
def profiled(config: ProfileConfig, root: Path, step: int, rank: int) -> Iterator[None]:
    """Profile the `with` block if `config` asks for this step and rank.

    For example, the trace of rank 0 is `trainer_rank_0.pt.trace.json.gz` in `profile_folder(root,
    step)`. chrome://tracing, Perfetto and TensorBoard can open it. If the block raises an
    exception, no trace is written.
    """
    if step not in config.steps or rank not in config.ranks:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    folder = profile_folder(root, step)
    folder.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=activities, record_shapes=True, with_stack=config.with_stack
    ) as recorded:
        yield
    recorded.export_chrome_trace(str(folder / f"trainer_rank_{rank}.pt.trace.json.gz"))
