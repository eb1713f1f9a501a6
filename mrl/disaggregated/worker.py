"""This module is the worker of a rollout rank, by a fixed schedule: `python -m mrl.disaggregated`.

It leads one engine, which is always awake, and scores what the engine generates. Weights come into a
copy in the host's memory while the engine generates, and are loaded between two works. It imports no
Megatron.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from mrl.collect.canary import check_canaries, default_tolerance
from mrl.collect.engine_nodes import served_adapter
from mrl.collect.evaluation import EvalTasks
from mrl.collect.scoring import Scoring
from mrl.collect.task import Task, make_step_task
from mrl.disaggregated.activity import ActivityLog
from mrl.disaggregated.engine_place import EnginePlace
from mrl.disaggregated.staging import Staging
from mrl.disaggregated.weights import WeightReceiver, transfer_device
from mrl.disaggregated.wire import Wire, WireClosed
from mrl.disaggregated.work import Delivered, Work
from mrl.errors import EngineGone, InputError, RunFailed
from mrl.preflight import Plan
from mrl.rollout.base import EngineLost
from mrl.system.heartbeat import num_beats
from parallel.implementation import choose_dtype

PULSE_S = 1.0
JOIN_S = 60.0


@dataclass
class _Measured:
    """Adds up what one work cost beside its generation."""

    restarts: int = 0
    recovery_s: float = 0.0
    verify_s: float = 0.0
    canary: float = 0.0
    sync_bytes: int = 0

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/engine_restarts": float(self.restarts),
            "time/recovery_s": self.recovery_s,
            "time/verify_s": self.verify_s,
            "rollout/canary_abs_mean": self.canary,
            "rollout/sync_bytes": float(self.sync_bytes),
        }


@dataclass(frozen=True)
class Event:
    """An `Event` is what the main thread heeds: a message, weights that have come, an error."""

    message: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    staging: Staging | None = None
    error: Exception | None = None


class Worker:
    """Does the work of one engine by a fixed schedule, until the trainer says that the run is over."""

    def __init__(self, plan: Plan, place: EnginePlace, settings: dict[str, Any]) -> None:
        """`settings`: `server`, the address, and `token` of the trainer's server; `pulse`, the end of a
        pipe to the supervisor."""
        recipe = plan.recipe
        self.plan, self._place, self._engine = plan, place, place.engine
        self._supervisor = int(settings["pulse"])
        """The end of a pipe whose other end sees that this process lives."""
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._work: dict[int, Work] = {}
        self._version: int | None = None
        """The weights that the engine holds for work; None before the first that the trainer sent."""
        self._staged: list[Staging] = []
        """Versions in the host's memory that are not loaded, the oldest first."""
        self._held: Staging | None = None
        """The version that is loaded: another engine needs it, should this one be lost."""
        tp = recipe.rollout.tensor_parallel_size
        self._device = transfer_device(sends_adapter=served_adapter(plan) is not None)
        gpu = self._device if self._device.type == "cuda" else None
        self._free = [Staging(tp, gpu) for _ in range(recipe.asynchronous.staged_versions)]
        self._measured = _Measured()
        self._activity = ActivityLog("start")
        with ExitStack() as undo:  # a worker that cannot join leaves nothing behind
            self._join(undo, settings)
            self._undo = undo.pop_all()

    def _join(self, undo: ExitStack, settings: dict[str, Any]) -> None:
        """Start the processes of rewards, and connect to the trainer. Raises WireClosed if that is
        gone."""
        recipe, plan, place = self.plan.recipe, self.plan, self._place
        undo.callback(place.stop)
        self._scoring = Scoring(recipe, plan.tokenizer, place.budget, place.user)
        undo.callback(self._scoring.close)
        self._evaluations = EvalTasks(plan, place.number, place.budget, place.user)
        undo.callback(self._evaluations.close)
        dtypes = recipe.model.dtype, recipe.rollout.engine_dtype(recipe.model)
        self._tolerance = recipe.rollout.canary_tolerance or default_tolerance(
            *map(choose_dtype, dtypes)
        )
        address = tuple(settings["server"])
        try:
            self._wire = Wire(socket.create_connection(address, JOIN_S))
        except OSError as error:  # the run may be over by now
            raise WireClosed(f"the trainer at {address} does not answer: {error}") from None
        undo.callback(self._wire.close)
        self._wire.send({"type": "hello", "token": settings["token"], "engine": place.number})
        welcome, _ = self._wire.receive()
        self._receiver = WeightReceiver(
            tuple(welcome["store"]),
            welcome["pair"],
            recipe.asynchronous.worker_timeout_s,
            self._device,
        )
        undo.callback(self._receiver.close)

    def run(self) -> None:
        """Work until the trainer says that the run is over. Raises WireClosed where it is gone."""
        with self._undo:
            for target in (self._read, self._pulse, self._report_progress):
                threading.Thread(target=target, name="mrl-wire", daemon=True).start()
            try:
                self._place.start()
                self._wire.send({"type": "started"})
                self._heed_events()
            except WireClosed:
                raise
            except self._place.reported as error:
                self._wire.send({"type": "failed", **kind_and_text(error)})
                raise

    def leave(self) -> None:
        """Close the connection to the trainer; from any thread. run() then raises WireClosed."""
        self._wire.close()

    def _heed_events(self) -> None:
        while True:
            self._activity.enter(self._waiting())
            event = self._events.get()
            if event.error is not None:
                raise event.error
            if event.staging is not None:
                self._staged.append(event.staging)
            kind = event.message.get("type")
            if kind == "stop":
                return
            if kind == "receive":
                self._receive(int(event.message["version"]))
            elif kind == "work":
                work = Work.of_frame(event.message, event.body)
                self._work[work.work_id] = work  # again, where it is for other weights now
            self._heed(event)
            while self._advance():
                pass

    def _waiting(self) -> str:
        """Return the activity of the engine while this thread waits for an event."""
        return "weights" if self._work or self._version is None else "bound"

    def _heed(self, event: Event) -> None:
        """Take in what else an event says."""

    def _advance(self) -> bool:
        """Do the next work, or load the next weights; return whether there was any to do."""
        work = next(iter(self._work.values()), None)
        if work is not None and work.version == self._version:
            self._do(work)
            return True
        if self._version is None or work is None or work.version > self._version:
            self._release()
            if self._staged:
                self._load_next()
                return True
        return False

    def _load_next(self) -> None:
        """Load the oldest of the versions that wait."""
        self._activity.enter("load")
        self._held = self._staged.pop(0)
        self._load(self._held)
        self._version = self._held.version

    def _release(self) -> None:
        """Make room for another version where no work is left for the loaded one, which stays until
        another one comes."""
        if self._held is not None and self._held not in self._free:
            self._give_room(self._held)

    def _give_room(self, staging: Staging) -> None:
        self._free.append(staging)
        if len(self._free) == 1:
            self._wire.send({"type": "free"})

    def _load(self, staging: Staging) -> None:
        """Bring the engine to staged weights, and prove that it runs the trainer's model."""
        with self._activity.during("load"):
            while True:
                try:
                    self._update(staging)
                    self._check_canaries(staging)
                    return
                except EngineLost as error:
                    self._start_another(error)

    def _update(self, staging: Staging) -> None:
        assert staging.version is not None
        self._place.budget.begin_step()
        report = self._engine.update_weights(staging.buckets(), staging.version)
        self._measured.verify_s += report.digest_s
        self._measured.sync_bytes = report.num_bytes

    def _check_canaries(self, staging: Staging) -> None:
        if (canaries := staging.canaries) is None:
            return
        begin = time.perf_counter()
        found = check_canaries(self._engine, canaries.sequences, canaries.logprobs, self._tolerance)
        self._measured.canary = max(self._measured.canary, found)
        self._measured.verify_s += time.perf_counter() - begin

    def _do(self, work: Work) -> None:
        """Generate and score a work, and deliver it."""
        self._place.budget.begin_step()
        self._activity.enter("evaluate" if work.kind == "evaluation" else "generate")
        tasks = self._tasks(work)
        while remaining := [task for task in tasks if not task.is_over]:
            try:
                for task in remaining:
                    task.run(self._engine)
            except EngineLost as error:
                self._start_another(error)
                assert self._held is not None
                self._load(self._held)
        self._activity.enter("score")
        for part, task in enumerate(tasks):
            groups, num_failed = task.finish()
            partial = task.partial if work.kind == "batch" else []
            self._wire.send(*Delivered(groups, num_failed, partial).frame(work.work_id, part))
        self._report()
        self._place.begin_batch()
        self._wire.send({"type": "done", "work_id": work.work_id})
        del self._work[work.work_id]

    def _report(self) -> None:
        """Say what was measured since the last report."""
        self._wire.send({"type": "measured", "metrics": self._measured.metrics()})
        self._measured = _Measured(sync_bytes=self._measured.sync_bytes)

    def _tasks(self, work: Work) -> list[Task]:
        if work.kind == "evaluation":
            return self._evaluations.begin()
        return [make_step_task(self.plan, self._scoring, work.started, work.num_wanted)]

    def _start_another(self, error: EngineLost) -> None:
        """Start an engine in the place of a lost one. Raises EngineGone after too many."""
        begin = time.perf_counter()
        with self._activity.during("start"):
            self._measured.restarts += self._place.replace(error)
        self._measured.recovery_s += time.perf_counter() - begin

    def _receive(self, version: int) -> None:
        """Receive a version in a thread, while the engine works."""
        staging = self._free.pop(0)
        if staging is self._held:  # no work is left for the version that it held
            self._held = None
        if self._free:
            self._wire.send({"type": "free"})

        def receive() -> None:
            try:
                self._receiver.receive(staging, version)
            except Exception as error:  # the main thread raises it
                self._events.put(Event(error=error))
            else:
                self._events.put(Event(staging=staging))

        threading.Thread(target=receive, name="mrl-weights", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self._events.put(Event(*self._wire.receive()))
        except WireClosed as error:
            self._events.put(Event(error=error))

    def _pulse(self) -> None:
        """Send heartbeats to the supervisor, also while a large frame is being sent to the trainer,
        until the connection is closed."""
        with suppress(OSError):
            while not self._wire.is_closed:
                os.write(self._supervisor, b".")
                time.sleep(PULSE_S)

    def _report_progress(self) -> None:
        """Report progress and the state of the engine to the trainer."""
        with suppress(WireClosed):
            while True:
                known = {"version": self._version, "activity": self._activity.take()}
                self._wire.send({"type": "pulse", "progress": num_beats(), **known})
                self._activity.wait(PULSE_S)


def kind_and_text(error: Exception) -> dict[str, str]:
    """Return what the trainer is told of an error, as `mrl.disaggregated.peers.ERRORS` has it."""
    for kind in (EngineGone, InputError):
        if isinstance(error, kind):
            return {"error": kind.__name__, "text": str(error)}
    text = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
    return {"error": "RunFailed", "text": " ".join(text.split())}
