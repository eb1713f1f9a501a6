"""This module trains while engines are added and removed, for `benchmarks.elastic_engines`.

A thread adds and removes engines of a run at random moments by the requests of `mrl engines`. The run
is compared with one whose engines stay: weights, optimizer state, samples and metrics.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.elastic_reward import VARIABLE
from benchmarks.evidence.digest import ROOT
from mrl.drill.job import Job, Unexpected, num_rows
from mrl.engine_pool.elastic.client import ask_engines
from mrl.errors import InputError, RunFailed
from mrl.run.folder import RunFolder
from mrl.run.history import History
from mrl.system.files import write_whole

LIMIT_S = 3000.0
GONE_S = 120.0
KEYS = (
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_response_len=12"),
    *(
        "rollout.min_response_len=0",
        "rollout.placement=disaggregated",
        "rollout.batch_invariant=true",
    ),
    "reward=benchmarks.elastic_reward:reward",
)
TIMED = ("time/", "throughput/", "memory/", "async/trainer_idle", "async/rollout_idle")
"""Prefixes of metrics that no two runs have alike."""
MOMENTARY = {
    *("async/engine_lag", "async/leased_groups", "async/queue_age", "async/queued_groups"),
    *("async/versions_in_flight", "rollout/canary_abs_mean", "rollout/num_engines"),
    *("rollout/engine_restarts", "async/lost_workers"),
}
"""Metrics of engines at a moment, which the bits of the samples do not determine."""
OF_A_START = (
    "rollout/sync_bytes",  # its samples may be those of the checkpoint, and no sync was before it
    *("guard/ratio_error", "guard/clip_budget"),  # measured in the first step of a job
)
"""Prefixes of metrics that are not compared in the first step after a resume."""


def command(model: Path, run: Path, num_engines: int, keys: Sequence[str]) -> list[str]:
    """Return the command that trains with one trainer rank and `num_engines` engines."""
    launcher = [sys.executable, "-W", "ignore", "-m", "mrl.launch", "--standalone"]
    return [
        *launcher, f"--nproc-per-node={num_engines + 1}", "-m", "mrl", "train",
        str(ROOT / "launch/recipes/toy_moe.yaml"), f"model.path={model}", f"output_dir={run}",
        f"rollout.num_ranks={num_engines}", *KEYS, *keys,
    ]  # fmt: skip


def start(command: Sequence[str], run: Path, pace_s: float) -> Job:
    """Start a run, whose rewards of a group take `pace_s` seconds, until `set_pace` changes that."""
    scratch = run.with_suffix(".scratch")
    scratch.mkdir(parents=True, exist_ok=True)
    set_pace(run, pace_s)
    os.environ[VARIABLE] = str(_pace_of(run))
    try:
        return Job(command, run, run.with_suffix(".log"), scratch, LIMIT_S)
    finally:
        del os.environ[VARIABLE]


def set_pace(run: Path, pace_s: float) -> None:
    """Set the seconds that the reward of a group takes."""
    write_whole(_pace_of(run), f"{pace_s:g}")


def _pace_of(run: Path) -> Path:
    return run.with_suffix(".pace")


@dataclass
class Change:
    """A command that was given to a run."""

    what: str
    """`add`, `remove` or `remove --now`."""
    step: int
    """The number of steps that were done."""
    engine: int
    refused: str = ""


@dataclass
class RandomChanges:
    """Adds and removes engines of a run at random moments, in a thread, until the run ends."""

    run: Path
    seed: int
    most: int
    """How many engines there may be at a time."""
    with_now: bool
    """Whether engines are also removed with `--now`."""
    wait_s: tuple[float, float] = (1.0, 8.0)
    """The shortest and the longest time between two commands."""
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._is_over.wait(self._random.uniform(*self.wait_s)):
            with suppress(InputError, RunFailed):  # the run has not begun, or is over
                self._change()

    def _change(self) -> None:
        present = ask_engines(self.run, "GET", "/engines")["engines"]
        step = num_rows(self.run)
        if len(present) < self.most and self._random.random() < 0.7:
            added = ask_engines(self.run, "POST", "/engines", {})["added"]
            self.changes.append(Change("add", step, added[0]))
            return
        serving = [row for row in present if row["state"] in ("serving", "syncing", "lost")]
        others = [row for row in present if row["state"] == "starting"]
        is_early = bool(others) and self._random.random() < 0.1  # a start takes long
        found = others if is_early else serving
        if not found:
            return  # they are all leaving, or starting
        number = self._random.choice(found)["number"]
        now = self.with_now and self._random.random() < 0.5
        change = Change("remove --now" if now else "remove", step, number)
        try:
            ask_engines(self.run, "DELETE", f"/engines/{number}", {"now": now})
        except InputError as error:
            change.refused = str(error)
        self.changes.append(change)

    def counts(self) -> dict[str, int]:
        """Return how many commands of each kind the run has carried out, and how many it has
        refused."""
        found = Counter("refused" if each.refused else each.what for each in self.changes)
        return {name: found[name] for name in ("add", "remove", "remove --now", "refused")}


def finish(job: Job) -> None:
    """Wait until a run is done. Raises Unexpected if it fails or leaves anything."""
    try:
        if code := job.end():
            raise Unexpected(f"ended with code {code}; see {job.log}")
        if left := job.left():
            raise Unexpected("; ".join(left))
    finally:
        job.kill()


def kill_launcher(job: Job) -> None:
    """Kill the launcher of a run (SIGKILL). Raises Unexpected if a process of the run stays, which is
    looked for as long as a worker may take to import its modules."""
    job.look()
    job.process.kill()
    psutil.wait_procs(job.known(), timeout=GONE_S)
    if left := job.known():
        names = ", ".join(" ".join(each.cmdline()[:4]) for each in left)
        raise Unexpected(f"{names}: still there {GONE_S:g} s after its launcher was killed")


def wait_for(condition: Callable[[], Any], job: Job, what: str) -> None:
    """Wait until a condition holds; it may ask the run, which need not listen yet."""

    def holds() -> bool:
        with suppress(InputError):
            return bool(condition())
        return False

    job.wait(holds, what)


def states(run: Path) -> dict[int, str]:
    """Return the state of each engine that a run has."""
    return {row["number"]: row["state"] for row in ask_engines(run, "GET", "/engines")["engines"]}


def bits(run: Path, step: int) -> dict[str, bytes]:
    """Return the tensors of a checkpoint: weights and optimizer."""
    folder = run / "checkpoints" / f"iter_{step:07d}"
    found = {file.name: file.read_bytes() for file in sorted(folder.glob("*.distcp"))}
    if not found:
        raise Unexpected(f"{run} has no checkpoint of step {step}")
    return found


def differences(run: Path, calm: Path, step: int) -> list[str]:
    """Return what differs between two runs of `step` steps, in words."""
    found = [] if bits(run, step) == bits(calm, step) else ["the tensors of the checkpoint"]
    rows, others = RunFolder(run).read_metrics(), RunFolder(calm).read_metrics()
    if len(rows) != step or len(others) != step:
        found.append(f"{len(rows)} and {len(others)} steps")
    resumed = {entry["step"] for each in (run, calm) for entry in History(each).read()} - {0}
    for row, other in zip(rows, others, strict=False):
        left_out = (*TIMED, *OF_A_START) if row["step"] in resumed else TIMED
        keys = {*row, *other} - MOMENTARY
        different = {k for k in keys if not k.startswith(left_out) and row.get(k) != other.get(k)}
        found += [f"step {int(row['step'])}: {key}" for key in sorted(different)]
    for number in range(step):
        files = [RunFolder(each).rollout_file(number) for each in (run, calm)]
        if files[0].read_bytes() != files[1].read_bytes():
            found.append(f"the samples of step {number}")
    return found


def num_compared(run: Path) -> int:
    """Return how many metrics of a step are compared."""
    return sum(
        not key.startswith(TIMED) and key not in MOMENTARY
        for key in RunFolder(run).read_metrics()[-1]
    )


def engines_by_step(run: Path) -> list[int]:
    """Return how many engines served at each step."""
    return [int(row["rollout/num_engines"]) for row in RunFolder(run).read_metrics()]
