"""The jobs that are struck: runs in each placement, and the limits that they have in the table."""

from __future__ import annotations

import itertools
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from benchmarks.fault_table.base import RECIPE, Toy
from mrl.config import load_recipe
from mrl.drill import Drill
from mrl.drill.job import Job, num_rows

RANKS, NUM_STEPS = 2, 30
SMALL = (
    *("rollout.samples_per_prompt=2", "rollout.max_response_len=24"),
    *("rollout.min_response_len=24", "diagnosis.decompose_every=0"),
)
"""Steps of about half a second on an idle machine."""
LEFT = 7
"""Steps that a job must have left when a process is struck."""
LIMITS = (
    "rollout.stall_timeout_s=15", "rollout.request_timeout_s=60", "rollout.start_timeout_s=240",
    "reward_timeout_s=15", "watch.first_limit_s=240", "watch.limits.start=180",
    "rollout.max_restarts=100",
    *(f"watch.limits.{phase}=30" for phase in ("score", "logprobs", "train", "save", "log")),
)  # fmt: skip
"""The product's own limits, small enough to be waited for on a busy machine."""
WAIT_S = 600.0
"""Seconds after which a job still waits: more than the longest of its own limits, with a margin."""
MEETING_WAIT_S = 1000.0
"""The same before the ranks have met, where torch's limits hold."""


class Subject(Protocol):
    """A `Subject` is a job in one placement that can be struck, and started again."""

    num_trainers: int
    judges_bits: bool
    """Whether an undisturbed job would have given the same bits."""
    keeps_bits: bool
    """Whether it gives these bits also where an engine or its worker was replaced."""

    @property
    def job(self) -> Job | None:
        """The start that runs now, or ran last."""
        ...

    def prepare(self) -> None:
        """Train without a fault, to compare with. Raises Unexpected."""
        ...

    def rows(self) -> int:
        """Return how many steps are done, in a service by the tenant that is furthest."""
        ...

    def paused(self) -> list[str]:
        """Return the tenants of a service that were paused, and why."""
        ...

    def start(self) -> Job:
        """Start the job, from its newest checkpoint where it has one."""
        ...

    def running(self) -> Job:
        """Return the job, which has done a step since its start and has more to do."""
        ...

    def continued(self, done: int, command: str) -> list[str]:
        """Start again; return what differs from the job without a fault. Raises Unexpected."""
        ...

    def differences(self) -> list[str]:
        """Return where the steps so far are not those of the job without a fault."""
        ...

    def begin_anew(self, name: str) -> None:
        """Put aside what is on file, under a name; the next start is the first one."""
        ...

    def end(self) -> None:
        """Leave no process and no temporary directory behind."""
        ...


class Run:
    """A run of `mrl train` under `mrl.launch`."""

    def __init__(self, folder: Path, model: Path, keys: tuple[str, ...]) -> None:
        toy = Toy(folder.parent, model)
        self.folder = folder
        self.recipe = load_recipe(
            RECIPE, [*toy.overrides(output=folder.name), *SMALL, *LIMITS, *keys]
        )
        self._drill: Drill | None = None
        self.num_trainers = RANKS - (self.recipe.rollout.num_ranks or 0)
        self.judges_bits = not self.recipe.asynchronous.is_free
        self.keeps_bits = not self.recipe.asynchronous.max_staleness

    @property
    def drill(self) -> Drill:
        assert self._drill is not None
        return self._drill

    @property
    def job(self) -> Job | None:
        return self.drill.job

    def prepare(self) -> None:
        self._drill = Drill(self.recipe, RANKS, new_part(self.folder), NUM_STEPS)
        kept = self.folder / "reference"  # of an earlier call
        if not self.drill.judges_bits:
            return
        if num_rows(kept) == NUM_STEPS:
            shutil.copytree(kept, self.drill.reference)
        else:
            self.drill.train_without_fault()
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self.drill.reference, kept)

    def rows(self) -> int:
        return num_rows(self.drill.run)

    def paused(self) -> list[str]:
        return []

    def start(self) -> Job:
        self.drill.close()
        if self.rows() > NUM_STEPS - LEFT:
            self.begin_anew("done")
        self.drill.job = self.drill.start()
        return self.drill.job

    def running(self) -> Job:
        if self.rows() > NUM_STEPS - LEFT:
            self.begin_anew("done")
        return self.drill.running()

    def continued(self, done: int, command: str) -> list[str]:
        return self.drill.continued(done, command)

    def differences(self) -> list[str]:
        return self.drill.differences() if self.drill.judges_bits else []

    def begin_anew(self, name: str) -> None:
        self.drill.close()
        folder = self.drill.folder / f"broken_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            shutil.move(self.drill.run, folder)
        if name == "done":
            shutil.rmtree(folder, ignore_errors=True)
        self.drill.judges_bits = self.judges_bits

    def end(self) -> None:
        if self._drill is not None:
            self._drill.end()


def new_part(folder: Path) -> Path:
    """Return the folder of this call, which is not there yet."""
    return next(
        part for number in itertools.count() if not (part := folder / f"part_{number}").exists()
    )
