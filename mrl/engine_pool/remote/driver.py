"""Drives a worker's engine: loads weights, carries out work items, and replaces a lost engine.

A schedule (`FixedWorks` or `Leases`) decides what is done next. The worker's main thread does
everything: it takes functions from a queue and calls them. The other threads wait for messages,
weights or samples, and only add functions to the queue.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from mrl.config import Recipe
from mrl.engine_pool.metrics import EngineMetrics
from mrl.engine_pool.remote.activity import ActivityLog
from mrl.engine_pool.remote.engine_owner import WorkerEngine
from mrl.engine_pool.remote.jobs import Jobs
from mrl.engine_pool.remote.messages import Work
from mrl.engine_pool.remote.wire import Wire
from mrl.engines.base import EngineLost
from mrl.weight_sync.base import WeightReceiver
from mrl.weight_sync.load import WeightLoader
from mrl.weight_sync.staging import Staging

Functions = queue.SimpleQueue[Callable[[], None]]
"""A queue of functions that the main thread of a worker calls in order. Any thread may add one."""


def raising(error: Exception) -> Callable[[], None]:
    """Return a function that raises `error`."""

    def fail() -> NoReturn:
        raise error

    return fail


class StagedVersions:
    """The versions of the weights that a worker holds in host memory."""

    def __init__(
        self, buffers: Iterable[Staging], receiver: WeightReceiver, wire: Wire, main: Functions
    ) -> None:
        self._free = list(buffers)
        self._receiver, self._wire, self._main = receiver, wire, main
        self.waiting: list[Staging] = []
        """Versions that have arrived completely and are not loaded yet, the oldest first."""
        self.loaded: Staging | None = None
        """The buffer with the version that the engine has loaded. If the engine is lost, the next
        engine loads this version again. The buffer may be marked free already: its contents stay
        valid until it receives another version."""

    def receive(self, version: int) -> None:
        """Receive a version into a free buffer in another thread, while the engine generates."""
        staging = self._free.pop(0)
        if staging is self.loaded:  # the version in it is not needed any more
            self.loaded = None
        if self._free:
            self._wire.send({"type": "free"})

        def receive() -> None:
            try:
                self._receiver.receive(staging, version)
            except Exception as error:
                self._main.put(raising(error))
            else:
                self._main.put(lambda: self.waiting.append(staging))

        threading.Thread(target=receive, name="mrl-weights", daemon=True).start()

    def free(self, staging: Staging) -> None:
        """Mark a buffer as free for another version. If no other buffer is free, tell the trainer
        that this worker can receive weights again."""
        self._free.append(staging)
        if len(self._free) == 1:
            self._wire.send({"type": "free"})

    def free_loaded(self) -> None:
        """Mark the buffer of the loaded version as free, unless there is none or it is free
        already."""
        if self.loaded is not None and self.loaded not in self._free:
            self.free(self.loaded)


class Schedule(Protocol):
    """Decides what a worker does next. All methods are called in the worker's main thread."""

    def handle(self, message: dict[str, Any], body: bytes) -> None:
        """Process a message from the trainer whose type is not `receive`, `work` or `stop`."""
        ...

    def advance(self) -> bool:
        """Do the next thing that can be done now, if any. Return True if `advance` should be called
        again at once, and False if the caller should first wait for the next function in the
        queue."""
        ...

    def waits_in(self) -> str:
        """Return the activity to record while the main thread waits for the next function."""
        ...


@dataclass
class EngineDriver:
    """Carries out work items, loads weights, and replaces a lost engine. Its methods run in the
    main thread."""

    recipe: Recipe
    engine: WorkerEngine
    jobs: Jobs
    wire: Wire
    main: Functions
    versions: StagedVersions

    def __post_init__(self) -> None:
        rollout, model = self.recipe.rollout, self.recipe.model
        self.version: int | None = None
        """The version of the weights in the engine; None before it has loaded a version from the
        trainer."""
        self.works: dict[int, Work] = {}
        """Work items that are not delivered yet, by id, in the order in which they were
        assigned."""
        self.activity = ActivityLog("start")
        self._metrics = EngineMetrics()
        self._loader = WeightLoader(rollout, model, self._metrics)

    @property
    def next_work(self) -> Work | None:
        """The oldest of the undelivered work items that need the oldest weights; None if there is
        none. A work item that another engine has left may need older ones than those before it."""
        return min(self.works.values(), key=lambda work: work.version, default=None)

    def load_next(self) -> None:
        """Load the oldest version in `versions.waiting`."""
        self.activity.enter("load")
        self.versions.loaded = self.versions.waiting.pop(0)
        self.load(self.versions.loaded)
        self.version = self.versions.loaded.version

    def load(self, staging: Staging) -> None:
        """Load a version and check it with canaries. If the engine is lost, start another engine
        and try again."""
        with self.activity.during("load"):
            while True:
                try:
                    self.update(staging)
                    self._loader.check_canaries(self.engine.endpoint, staging.canaries)
                    return
                except EngineLost as error:
                    self.replace_engine(error)

    def update(self, staging: Staging) -> None:
        """Load a version without checking canaries. Raises EngineLost."""
        assert staging.version is not None
        self.engine.budget.begin_step()
        self._loader.update(self.engine.endpoint, staging.buckets(), staging.version)

    def reload(self) -> None:
        """Load into the new engine the version of the weights that the lost engine had."""
        assert self.versions.loaded is not None
        self.load(self.versions.loaded)

    def do(self, work: Work) -> None:
        """Generate and score the groups of a work item, and send them to the trainer."""
        self.engine.budget.begin_step()
        self.activity.enter("evaluate" if work.kind == "evaluation" else "generate")
        jobs = self.jobs.of(work)
        while remaining := [job for job in jobs if not job.is_over]:
            try:
                for job in remaining:
                    job.run(self.engine.endpoint)
            except EngineLost as error:
                self.replace_engine(error)
                self.reload()
        self.activity.enter("score")
        for part, job in enumerate(jobs):
            self.wire.send(*job.finish().frame(work.work_id, part))
        self.report_metrics()
        self.engine.owner.reset_losses()
        self.wire.send({"type": "done", "work_id": work.work_id})
        del self.works[work.work_id]

    def replace_engine(self, error: EngineLost) -> None:
        """Start another engine after a loss. Raises EngineGone if too many engines were lost in a
        row (`mrl.engine_pool.restarts`)."""
        with self.activity.during("start"), self._metrics.recovering():
            self._metrics.num_restarts += self.engine.owner.replace(error)

    def report_metrics(self) -> None:
        """Send the measurements since the last report to the trainer."""
        self.wire.send({"type": "measured", "metrics": self._metrics.as_dict()})
        self._metrics.reset()


class FixedWorks:
    """A `Schedule` that carries out each work item with the version of the weights that the item
    names. The schedule loads newer weights once no work item needs the loaded version."""

    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver

    def handle(self, message: dict[str, Any], body: bytes) -> None:
        """Ignore the message, because this schedule needs no further messages."""

    def advance(self) -> bool:
        driver, work = self._driver, self._driver.next_work
        if work is not None and work.version == driver.version:
            driver.do(work)
            return True
        if driver.version is None or work is None or work.version > driver.version:
            driver.versions.free_loaded()
            if driver.versions.waiting:
                driver.load_next()
                return True
        return False

    def waits_in(self) -> str:
        return "weights" if self._driver.works or self._driver.version is None else "bound"
