"""A service whose engines are on ranks of their own: tenants roll out while others are trained.

A turn does what can be done without a wait: it sends the adapters for which engines have room, takes
the samples that are there, and trains one tenant.
"""

from __future__ import annotations

import json
import time
from typing import Literal

from mrl.config import Recipe, ServiceConfig
from mrl.disaggregated.collector import DisaggregatedCollector, Outlook
from mrl.exchange.sharing import share_bytes
from mrl.system.heartbeat import beat
from mrl.tenants.disaggregated_house import DisaggregatedHouse
from mrl.tenants.registry import Registry
from mrl.tenants.service import SERVICE_FAULTS, Publish, Service, describe
from mrl.tenants.tenant_run import TenantRun

POLL_S = 0.05
"""Seconds between two looks at what workers have brought, while there is nothing to do."""
Stage = Literal["new", "rolling out", "waiting to train"]


class DisaggregatedRun(TenantRun):
    """A `DisaggregatedRun` gets its samples from workers, whenever they are there."""

    def __init__(
        self,
        name: str,
        weight: float,
        recipe: Recipe,
        house: DisaggregatedHouse,
        incarnation: str,
    ) -> None:
        super().__init__(name, weight, recipe, house.roles.world, house, incarnation)
        assert isinstance(self.collector, DisaggregatedCollector)
        self._remote = self.collector
        self.stage: Stage = "new"
        self.waits_since = 0.0
        """When it got in line to be trained, by rank 0's clock."""
        self._has_sent = False

    def begin(self) -> None:
        super().begin()
        self.stage, self._has_sent = "rolling out", False

    def outlook(self) -> Outlook:
        """Return what can be done now without a wait; for rank 0."""
        return self._remote.outlook(self.trainer.step, has_sent=self._has_sent)

    def send(self) -> None:
        """Send the adapter to the workers, which have room for it."""
        with self.clock.part("sync"):
            self.trainer.policy.mount(adapter_only=True)
            self._remote.sync(self.trainer.policy, self.trainer.step)
        self._has_sent = True

    def take(self) -> None:
        """Take the samples, which are there, and score what is left to be scored."""
        self._remote.rollout(self.clock)
        self.score()
        if self._remote.is_over:
            self.stage = "waiting to train"

    def train(self) -> dict[str, float]:
        metrics = super().train()
        self.stage = "new"
        return metrics


class DisaggregatedService(Service[DisaggregatedRun]):
    """Serves tenants while engines of rollout ranks generate."""

    def __init__(
        self,
        config: ServiceConfig,
        house: DisaggregatedHouse,
        registry: Registry | None,
        publish: Publish = lambda metrics: None,
    ) -> None:
        super().__init__(config, house, registry, publish)
        self._own_house = house
        self._num_updates = 0
        self._row_since = time.perf_counter()

    def _new_run(self, name: str, weight: float, recipe: Recipe) -> DisaggregatedRun:
        return DisaggregatedRun(name, weight, recipe, self._own_house, self._opened[name])

    def run_turn(self) -> None:
        """Do what can be done now, and train the tenant that is next."""
        self._begin_new()
        has_moved = self._heed_workers()
        if name := self._next():
            self._train_next(name)
        elif not has_moved:
            beat()  # for an idle service: engines have limits of their own
            time.sleep(POLL_S)

    def _begin_new(self) -> None:
        for run in [run for run in self._runs.values() if run.stage == "new"]:
            if run.is_over:
                self._finish(run)
            else:
                self._attempt(run, run.begin)

    def _heed_workers(self) -> bool:
        """Send and take what workers have room for and have brought; return whether there was any."""
        outlooks = self._outlooks()
        for name, (outlook, failure) in outlooks.items():
            run = self._runs[name]
            if failure:
                self._pause(run, failure)
            elif outlook == "send":
                self._attempt(run, run.send)
            elif self._attempt(run, run.take) and run.stage == "waiting to train":
                self._line_up(run)
        return bool(outlooks)

    def _line_up(self, run: DisaggregatedRun) -> None:
        """Let a tenant that has its samples wait for its turn, or begin anew where it has no more
        steps."""
        if run.is_done:  # the final weights are evaluated
            run.stage = "new"
            return
        run.waits_since = time.time()
        self._queue.ready(run.name, run.waits_since)

    def _outlooks(self) -> dict[str, tuple[Outlook, str]]:
        """Return, on every rank, what rank 0 sees of the tenants that roll out, less those that have to
        wait; and what went wrong with their workers."""
        found: dict[str, tuple[Outlook, str]] = {}
        if self._own_house.hub is not None:
            self._own_house.hub.check()
            for run in self._runs.values():
                if run.stage == "rolling out":
                    found[run.name] = self._outlook(run)
        seen = {name: each for name, each in found.items() if each != ("wait", "")}
        return json.loads(share_bytes(json.dumps(seen).encode())[0])

    def _outlook(self, run: DisaggregatedRun) -> tuple[Outlook, str]:
        try:
            return run.outlook(), ""
        except SERVICE_FAULTS:
            raise
        except Exception as error:
            return "wait", describe(error)

    def _train_next(self, name: str) -> None:
        run = self._runs[name]
        waited_s = time.time() - run.waits_since
        self._train(name)
        self._num_updates += 1
        if self._is_main and name in self._runs:
            now = time.perf_counter()
            row = {"round": float(self._num_updates - 1), "time/round_s": now - self._row_since}
            row |= {"time/timestamp": time.time(), "service/queue_age_s": waited_s}
            self._row_since = now
            assert self._own_house.hub is not None
            row |= self._engine_metrics(self._own_house.hub.take_times())
            self._write_row(row | run.metrics(waited_s))
