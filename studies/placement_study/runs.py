"""This module trains one arm on pinned cores and returns what it measured.

A rank and all that it starts keep to one core where the roles are apart: the trainer to the first, and
supervisor, worker and engine to the second. The two ranks of a colocated run share both cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from mrl.drill.job import Job, Unexpected, num_rows
from mrl.run.folder import RunFolder
from studies.placement_study.arms import KINDS, NUM_RANKS, RECIPES, Run
from studies.placement_study.figures import answer_lengths, figures, spread

LIMIT_S = 900.0
"""Seconds within which the next thing must come, on a machine that is busy with other work."""


def cores_of(run: Run) -> list[str]:
    """Return the cores of each rank, as `studies.placement_study.pinned` takes them.

    Raises RuntimeError if this process may use fewer than two.
    """
    cores = sorted(os.sched_getaffinity(0))[:NUM_RANKS]
    if len(cores) < NUM_RANKS:
        raise RuntimeError(f"got {len(cores)} core(s), expected {NUM_RANKS}: one for each role")
    if run.arm == "colocated":
        return [",".join(map(str, cores))] * NUM_RANKS
    return [str(core) for core in cores]


def command(run: Run, start: Path, output: Path) -> list[str]:
    """Return the command that trains a run into `output`."""
    launcher = ["-m", "mrl.launch", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    pinned = ["-m", "studies.placement_study.pinned", *cores_of(run), "--"]
    recipe = str(RECIPES / KINDS[run.kind].recipe)
    return [sys.executable, *launcher, *pinned, "train", recipe, *run.keys(start, output)]


def train(run: Run, start: Path, folder: Path) -> dict[str, Any]:
    """Train a run below `folder` and return its figures. Raises Unexpected where it does not end well,
    or leaves something behind."""
    output = folder / run.name
    begin, log = time.monotonic(), output.with_suffix(".log")
    # Not below `folder`: the paths of sockets are limited to 107 letters.
    with tempfile.TemporaryDirectory(prefix="mrl-placement-") as scratch:
        job = Job(command(run, start, output), output, log, Path(scratch), LIMIT_S)
        try:
            busy = busy_cores(job, run)
            if code := job.end():
                raise Unexpected(f"ended with code {code}; see {log}")
            # Files go with the folder. torch leaves an empty one for its compiler there.
            if left := [each for each in job.left() if each.startswith(("process ", "port "))]:
                raise Unexpected(f"{'; '.join(left)}; see {log}")
        finally:
            job.kill()
    rows = RunFolder(output).read_metrics()
    if len(rows) != run.num_steps:
        raise Unexpected(f"{len(rows)} steps of {run.num_steps} are in metrics.jsonl; see {log}")
    steps = [RunFolder(output).read_rollouts(i) for i in range(run.skipped, run.num_steps)]
    return {
        "kind": run.kind,
        "arm": run.arm,
        "seed": run.seed,
        **figures(rows, run.skipped, len(steps[0])),
        "spread": round(spread(map(answer_lengths, steps)), 3),
        "busy_cores": busy,
        "wall_s": round(time.monotonic() - begin, 1),
    }


def busy_cores(job: Job, run: Run) -> list[float]:
    """Watch a run from its first counted step to its last but one; return how many cores each rank kept
    busy, with all that it started."""
    taken: list[tuple[float, list[float]]] = []
    for number in (run.skipped, run.num_steps - 1):
        job.wait(lambda at=number: num_rows(job.run) >= at, f"step {number}")
        if not taken:
            job.look(closely=True)  # what must be gone at the end
        taken.append((time.monotonic(), [cpu_s(rank) for rank in job.ranks()]))
    (first_s, before), (last_s, after) = taken
    return [round((b - a) / (last_s - first_s), 3) for a, b in zip(before, after, strict=True)]


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of all below it."""
    total = 0.0
    with suppress(psutil.Error):
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                times = each.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total
