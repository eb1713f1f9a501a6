"""A service whose engines are on separate ranks. Engines generate for some tenants while the
trainer trains another tenant.

A turn does what is possible without waiting: it sends adapters that engines have room for, takes
samples that have arrived, and trains one tenant if one is ready.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from mrl.config import Recipe
from mrl.engine_pool.remote.pool import NextAction, RemotePool
from mrl.exchange.sharing import share_bytes
from mrl.service.consensus import SERVICE_FAULTS
from mrl.service.registry import Registry
from mrl.service.remote_engines import SharedRemoteEngines
from mrl.service.service import Publish, Service, describe
from mrl.service.shared import SharedResources
from mrl.service.tenant_run import TenantRun
from mrl.system.heartbeat import beat

POLL_S = 0.05
"""Seconds between two checks for messages from workers, while there is nothing to do."""
Stage = Literal["new", "to send", "sent", "waiting to train"]
"""How far a tenant is in its current step. "new": the step has not begun. "to send": the prompts
are chosen, but the tenant's weights have not been sent to the workers. "sent": the workers generate
the samples. "waiting to train": the samples are complete."""


@dataclass
class _Progress:
    """A tenant's progress in its current step."""

    stage: Stage = "new"
    waits_since: float = 0.0
    """The time at which the tenant began to wait for its update, in seconds since the epoch."""


class DisaggregatedService(Service[TenantRun]):
    """Trains tenants on the trainer ranks while the engines of the rollout ranks generate."""

    def __init__(
        self,
        shared: SharedResources[SharedRemoteEngines],
        registry: Registry | None,
        publish: Publish,
    ) -> None:
        super().__init__(shared, registry, publish)
        self._coordinator = shared.engines.coordinator
        self._progress: defaultdict[str, _Progress] = defaultdict(_Progress)
        self._num_updates = 0
        self._row_since = time.perf_counter()

    def _new_run(self, incarnation: str, weight: float, recipe: Recipe) -> TenantRun:
        return TenantRun(incarnation, weight, recipe, self._shared)

    def _forget(self, name: str) -> None:
        super()._forget(name)
        self._progress.pop(name, None)

    def run_turn(self) -> None:
        """Advance all tenants as far as is possible without waiting, and train the tenant that is
        next in the training queue."""
        self._begin_new()
        has_moved = self._exchange_with_workers()
        if name := self._next():
            self._train_next(name)
        elif not has_moved:
            beat()  # an idle service does not hang; `check` has time limits for engines
            time.sleep(POLL_S)

    def _begin_new(self) -> None:
        for run in [run for run in self._runs.values() if self._progress[run.name].stage == "new"]:
            if run.is_over:
                self._finish(run)
            else:
                self._attempt(run, lambda run=run: self._begin(run))

    def _begin(self, run: TenantRun) -> None:
        run.begin()
        self._progress[run.name].stage = "to send"

    def _exchange_with_workers(self) -> bool:
        """Send adapters that workers have room for, and take samples that have arrived. Return
        whether there was anything to do."""
        actions = self._next_actions()
        for name, (action, failure) in actions.items():
            run = self._runs[name]
            if failure:
                self._pause(run, failure)
            elif action == "send":
                self._attempt(run, lambda run=run: self._send(run))
            elif self._attempt(run, lambda run=run: self._take(run)) and run.collector.is_over:
                self._enqueue(run)
        return bool(actions)

    def _send(self, run: TenantRun) -> None:
        """Send the tenant's adapter to the workers, which must have room for it."""
        with run.clock.part("sync"):
            run.trainer.policy.mount(adapter_only=True)
            run.collector.sync(run.trainer.policy, run.step)
        self._progress[run.name].stage = "sent"

    def _take(self, run: TenantRun) -> None:
        """Take the samples of the tenant that have arrived, and score those that are not scored
        yet."""
        run.collector.rollout(run.clock)
        run.score()

    def _enqueue(self, run: TenantRun) -> None:
        """Put a tenant whose samples are complete into the training queue. If the tenant has
        completed all its steps, the samples are those of the final evaluation, and the tenant is
        not put into the queue."""
        progress = self._progress[run.name]
        if run.is_done:  # the final weights are evaluated
            progress.stage = "new"
            return
        progress.stage, progress.waits_since = "waiting to train", time.time()
        self._queue.ready(run.name, progress.waits_since)

    def _next_actions(self) -> dict[str, tuple[NextAction, str]]:
        """Return, by tenant name, a pair (action, failure) for each tenant whose rollout needs an
        action or has failed. Rank 0 determines the pairs; every rank returns the same result.

        The action is "send" (send the tenant's weights) or "take" (take its samples). The failure
        is an error that a worker reported for the tenant; empty if there is none. If there is a
        failure, the action is "wait". Tenants that have to wait and have no failure are left out.
        """
        found: dict[str, tuple[NextAction, str]] = {}
        if self._coordinator is not None:
            self._coordinator.check()
            for run in self._runs.values():
                if self._progress[run.name].stage in ("to send", "sent"):
                    found[run.name] = self._next_action(run)
        possible = {name: each for name, each in found.items() if each != ("wait", "")}
        return json.loads(share_bytes(json.dumps(possible).encode())[0])

    def _next_action(self, run: TenantRun) -> tuple[NextAction, str]:
        pool, current = run.collector.pool, run.collector.round
        assert isinstance(pool, RemotePool)
        assert current is not None
        has_sent = self._progress[run.name].stage == "sent"
        try:
            return pool.next_action(current.assignments, run.step, has_sent=has_sent), ""
        except SERVICE_FAULTS:
            raise
        except Exception as error:
            return "wait", describe(error)

    def _train_next(self, name: str) -> None:
        run, progress = self._runs[name], self._progress[name]
        waited_s = time.time() - progress.waits_since
        self._train(name)
        progress.stage = "new"
        self._num_updates += 1
        if self._coordinator is not None and name in self._runs:
            now = time.perf_counter()
            row = {"round": float(self._num_updates - 1), "time/round_s": now - self._row_since}
            row |= {"time/timestamp": time.time(), "service/queue_age_s": waited_s}
            self._row_since = now
            self._write_row(row | run.cost.metrics(name, waited_s), self._coordinator.take_times())
