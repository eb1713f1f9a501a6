"""The worker of a rollout rank. It runs one engine as the trainer's messages demand.

The engine is always awake. New weights arrive in host memory while the engine generates. A worker
does not import Megatron.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from mrl.collect.task import EngineTasks
from mrl.config import Recipe
from mrl.engine_pool.engine_nodes import served_adapter
from mrl.engine_pool.remote.driver import (
    EngineDriver,
    FixedWorks,
    Functions,
    Schedule,
    StagedVersions,
    raising,
)
from mrl.engine_pool.remote.engine_owner import WorkerEngine
from mrl.engine_pool.remote.jobs import Jobs, RecipeJobs
from mrl.engine_pool.remote.messages import Work, dying_message, failed_message
from mrl.engine_pool.remote.process import PULSE_S, connect
from mrl.engine_pool.remote.wire import Wire, WireClosed
from mrl.engine_pool.remote.worker_leases import Leases
from mrl.preflight import Plan
from mrl.system.heartbeat import num_beats, num_samples
from mrl.weight_sync.base import WeightReceiver
from mrl.weight_sync.staging import Staging
from mrl.weight_sync.transports import make_receiver, transfer_device

REPORT_S = 0.5
"""Seconds between two reports of a worker's progress to the trainer. Activities are reported at
once."""


class Worker:
    """Carries out what the trainer's messages ask of one engine, or of one of the tenants that share an
    engine, until the message `stop` comes."""

    def __init__(
        self,
        recipe: Recipe,
        engine: WorkerEngine,
        settings: Mapping[str, Any],
        jobs: Jobs,
        make_schedule: Callable[[EngineDriver], Schedule] = FixedWorks,
        *,
        sends_adapter: bool = True,
    ) -> None:
        """The keys of `settings`: `server` and `token` are the address and the token of the
        trainer's server; `engine` is the number of the engine; `pulse` is the file descriptor of a
        pipe to the supervisor. The worker closes `jobs`. `sends_adapter`: whether the weights are
        an adapter. Raises WireClosed if the trainer is gone."""
        self._engine, self._pulse_pipe = engine, int(settings["pulse"])
        self._main = Functions()
        self._is_over = False
        with ExitStack() as undo:  # release what was made if a later step fails
            undo.callback(jobs.close)
            self._wire = connect(settings)
            undo.callback(self._wire.close)
            versions, receiver = _receive_versions(
                recipe, self._wire, self._main, sends_adapter=sends_adapter
            )
            undo.callback(receiver.close)
            self.driver = EngineDriver(recipe, engine, jobs, self._wire, self._main, versions)
            self._schedule = make_schedule(self.driver)
            self._undo = undo.pop_all()

    @classmethod
    def of_plan(cls, plan: Plan, engine: WorkerEngine, settings: Mapping[str, Any]) -> Worker:
        """Return the worker of a recipe."""
        tasks = EngineTasks(plan, engine.budget, engine.user)
        schedule: Callable[[EngineDriver], Schedule] = FixedWorks
        if plan.recipe.asynchronous.is_free:
            schedule = partial(Leases, plan=plan, scoring=tasks.scoring)
        sends_adapter = served_adapter(plan) is not None
        return cls(
            plan.recipe, engine, settings, RecipeJobs(tasks), schedule, sends_adapter=sends_adapter
        )

    def run(self, start_engine: Callable[[], None] = lambda: None) -> None:
        """Call `start_engine`, and carry out the trainer's messages until it sends `stop`.

        Without `start_engine`, the engine must be running already. Raises WireClosed if the trainer
        is gone.
        """
        with self._undo:
            for target in (self._read, self._pulse, self._report_progress):
                threading.Thread(target=target, name="mrl-wire", daemon=True).start()
            try:
                start_engine()
                self._wire.send({"type": "started"})
                self._work()
            except WireClosed:
                raise
            except self._engine.reported_errors as error:
                self._wire.send(failed_message(error))
                raise
            except Exception as error:
                with suppress(WireClosed):
                    self._wire.send(dying_message(error))
                raise

    def leave(self) -> None:
        """Close the connection to the trainer, so that `run` raises WireClosed. Any thread may call
        this."""
        self._wire.close()

    def _work(self) -> None:
        while True:
            self.driver.activity.enter(self._schedule.waits_in())
            self._main.get()()
            if self._is_over:
                return
            while self._schedule.advance():
                pass

    def _handle(self, message: dict[str, Any], body: bytes) -> None:
        kind = message.get("type")
        if kind == "stop":
            self._is_over = True
        elif kind == "receive":
            self.driver.versions.receive(int(message["version"]))
        elif kind == "work":
            work = Work.of_frame(message, body)
            self.driver.works[work.work_id] = work  # replaces the work if its version has changed
        else:
            self._schedule.handle(message, body)

    def _read(self) -> None:
        try:
            while True:
                self._main.put(partial(self._handle, *self._wire.receive()))
        except WireClosed as error:
            self._main.put(raising(error))

    def _pulse(self) -> None:
        """Send heartbeats to the supervisor until the connection to the trainer is closed.

        The heartbeats use a pipe, so they continue while a large frame is being sent to the trainer.
        """
        with suppress(OSError):
            while not self._wire.is_closed:
                os.write(self._pulse_pipe, b".")
                time.sleep(PULSE_S)

    def _report_progress(self) -> None:
        """Repeatedly send to the trainer how much progress this worker has made, its numbers of
        samples, the version that the engine has loaded, and the engine's activities."""
        driver = self.driver
        with suppress(WireClosed):
            while True:
                known = {"version": driver.version, "activity": driver.activity.take()}
                known |= {"progress": num_beats(), "samples": num_samples()}
                self._wire.send({"type": "pulse", **known})
                driver.activity.wait(REPORT_S)


def _receive_versions(
    recipe: Recipe, wire: Wire, main: Functions, *, sends_adapter: bool
) -> tuple[StagedVersions, WeightReceiver]:
    """Wait for the trainer's `welcome` message, and prepare to receive weights. Return the versions
    that this worker holds in host memory (none yet), and the receiver of new versions. The message has
    the name under which weights are sent to this worker (`pair`), and the address of the store through
    which the trainer's ranks and the worker find each other."""
    welcome, _ = wire.receive()
    device = transfer_device(sends_adapter=sends_adapter)
    receiver = make_receiver(
        recipe.rollout.weight_sync,
        tuple(welcome["store"]),
        welcome["pair"],
        recipe.asynchronous.worker_timeout_s,
        device,
    )
    gpu = device if device.type == "cuda" else None
    num_ranks = recipe.rollout.tensor_parallel_size
    buffers = [Staging(num_ranks, gpu) for _ in range(recipe.asynchronous.staged_versions)]
    return StagedVersions(buffers, receiver, wire, main), receiver
