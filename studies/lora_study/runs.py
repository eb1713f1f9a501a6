"""This module trains the two runs of a pair side by side and returns what they measured."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mrl.drill.job import Job, Unexpected
from mrl.run.folder import RunFolder
from studies.lora_study.arms import RECIPE, ROOT, Pair, Run

LIMIT_S = 3600.0
"""Seconds within which a run must end, on a machine that is busy with other work."""
COLUMNS = {
    "rewards": "reward/mean",
    "gaps": "mismatch/logprob_abs_max",
    "coverages": "routing/replay_coverage",
    "sync_bytes": "rollout/sync_bytes",
    "sync_s": "time/sync_s",
    "verify_s": "time/verify_s",
}
"""What a result keeps of every step, and the metric that it is."""


def train(pair: Pair, start: Path, folder: Path) -> list[dict[str, Any]]:
    """Train the runs of `pair` below `folder` and return their results. Raises Unexpected where one of
    them does not end well."""
    # Not below `folder`: the paths of sockets are limited to 107 letters.
    with (
        tempfile.TemporaryDirectory(prefix="mrl-lora-") as scratch,
        contextlib.ExitStack() as stack,
    ):
        begin = time.monotonic()
        jobs = []
        for run in pair:
            output, own = folder / run.name, Path(scratch) / run.arm
            own.mkdir()
            command = [sys.executable, "-W", "ignore", "-m", "mrl", "train", str(RECIPE)]
            command += run.keys(start, output)
            jobs.append(Job(command, output, folder / f"{run.name}.log", own, LIMIT_S))
            stack.callback(jobs[-1].kill)
        for job in jobs:
            if code := job.end():
                raise Unexpected(f"ended with code {code}; see {job.log}")
        wall_s = time.monotonic() - begin
    return [result(run, folder / run.name, wall_s) for run in pair]


def result(run: Run, output: Path, wall_s: float) -> dict[str, Any]:
    """Return the result of a run that has ended; `wall_s`: seconds until both of its pair had."""
    rows = RunFolder(output).read_metrics()
    if len(rows) != run.num_steps:
        raise Unexpected(f"{output}: {len(rows)} steps in metrics.jsonl, expected {run.num_steps}")
    steps = [RunFolder(output).read_rollouts(step) for step in range(run.num_steps)]
    return {
        "model": run.model,
        "arm": run.arm,
        "rate": run.rate,
        "seed": run.seed,
        **{name: [float(f"{row[key]:.6g}") for row in rows] for name, key in COLUMNS.items()},
        "sync_bytes": [int(row["rollout/sync_bytes"]) for row in rows],
        "exported_bytes": exported_bytes(output),
        "num_samples": sum(map(len, steps)),
        "prompts": digest_of(line["prompt"] for step in steps for line in step),
        "wall_s": round(wall_s, 1),
    }


def exported_bytes(output: Path) -> int:
    """Return how many bytes of tensors `mrl export` writes for the run: the model, or the adapter."""
    folder = output.parent / f"{output.name}.exported"
    command = [sys.executable, "-W", "ignore", "-m", "mrl", "export", str(output), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unexpected(f"mrl export {output} ended with code {done.returncode}: {done.stderr}")
    return sum(tensor_bytes(file) for file in folder.glob("*.safetensors"))


def tensor_bytes(file: Path) -> int:
    """Return the bytes of a safetensors file without its header, whose length the first 8 bytes say."""
    with file.open("rb") as source:
        return file.stat().st_size - 8 - int.from_bytes(source.read(8), "little")


def digest_of(prompts: Iterable[str]) -> str:
    """Return a digest of prompts in their order."""
    return hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:16]
