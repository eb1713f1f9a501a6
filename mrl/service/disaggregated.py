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

from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.remote.pool import NextAction, RemotePool
from mrl.exchange.sharing import share_bytes
from mrl.service.consensus import SERVICE_FAULTS, describe
from mrl.service.registry import Registry
from mrl.service.remote_engines import SharedRemoteEngines
from mrl.service.service import Publish, Run, Service
from mrl.service.sessions.remote_sampling import RemoteSampling
from mrl.service.sessions.run import SessionRun
from mrl.service.shared import SharedResources
from mrl.service.tenant_run import TenantRun
from mrl.system.heartbeat import beat

POLL_S = 0.05
"""Seconds between two checks for messages from workers, while there is nothing to do."""
Stage = Literal["new", "to send", "sent", "waiting to train"]
"""How far a tenant is in its current step, or a session in its turn. "new": it has not begun. "to
send": the prompts are chosen, but the tenant's weights have not been sent to the workers. "sent": the
workers generate the samples. "waiting to train": the samples are complete."""


@dataclass
class _Progress:
    """A tenant's progress in its current step."""

    stage: Stage = "new"
    waits_since: float = 0.0
    """When the tenant began to wait for its update, on the clock of `time.monotonic`."""


class RecipeMember:
    """A tenant with a recipe in the exchange with the workers. For a session, `RemoteSampling` has the
    same methods. All of them except `next_action` are collectives."""

    def __init__(self, run: TenantRun) -> None:
        self._run = run

    @property
    def has_samples(self) -> bool:
        """Whether the samples of the step are complete."""
        return self._run.collector.is_over

    def next_action(self, *, has_sent: bool) -> NextAction:
        """Return what is to be done next for the tenant; only rank 0 calls this. `has_sent`: whether
        its weights were sent before in this step. Raises the errors that the workers have reported."""
        pool, current = self._run.collector.pool, self._run.collector.round
        assert isinstance(pool, RemotePool)
        assert current is not None
        return pool.next_action(current.assignments, self._run.step, has_sent=has_sent)

    def send(self) -> None:
        """Send the tenant's adapter to the workers, which must have room for it."""
        with self._run.clock.part("sync"):
            self._run.trainer.policy.mount(adapter_only=True)
            self._run.collector.sync(self._run.trainer.policy, self._run.step)

    def take(self) -> None:
        """Take the samples of the tenant that have arrived."""
        self._run.collector.rollout(self._run.clock)


def _member(run: Run) -> RemoteSampling | RecipeMember:
    """Return the object that represents the tenant of `run` in the exchange with the workers."""
    if not isinstance(run, SessionRun):
        return RecipeMember(run)
    assert isinstance(run.sampler.engines, RemoteSampling)
    return run.sampler.engines


class DisaggregatedService(Service):
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

    @property
    def membership(self) -> Membership | None:
        return None if self._coordinator is None else self._coordinator.membership

    def _forget(self, name: str) -> None:
        super()._forget(name)
        self._progress.pop(name, None)

    def run_turn(self) -> None:
        """Advance all tenants as far as is possible without waiting, and train the tenant that is
        next in the training queue."""
        has_begun = self._begin_new()
        has_moved = self._exchange_with_workers() or has_begun
        if name := self._next():
            self._train_next(name)
        elif not has_moved:
            beat()  # an idle service does not hang; `check` has time limits for engines
            time.sleep(POLL_S)

    def _begin_new(self) -> bool:
        """Begin the steps and turns that can begin. Return whether there was one."""
        new = [run for run in self._runs.values() if self._progress[run.name].stage == "new"]
        ready = [run for run in new if run.is_over or run.wants_turn]
        for run in ready:
            if run.is_over:
                self._finish(run)
            elif self._attempt(run, run.begin):
                self._go_on(run, "to send")
        return bool(ready)

    def _go_on(self, run: Run, stage: Stage) -> None:
        """Note that a tenant has reached a stage or, if its samples are complete, that it waits to be
        trained. With nothing to train, its step or turn is over."""
        progress = self._progress[run.name]
        if not _member(run).has_samples:
            progress.stage = stage
        elif not run.trains:  # the final weights are evaluated, or a client has only sampled
            progress.stage = "new"
        else:
            progress.stage, progress.waits_since = "waiting to train", time.monotonic()
            self._queue.ready(run.name, progress.waits_since)

    def _exchange_with_workers(self) -> bool:
        """Send adapters that workers have room for, and take samples that have arrived. Return
        whether there was anything to do."""
        actions = self._next_actions()
        for name, (action, failure) in actions.items():
            run = self._runs[name]
            if failure:
                self._pause(run, failure)
            elif action == "send":
                if self._attempt(run, _member(run).send):
                    self._progress[name].stage = "sent"
            elif self._attempt(run, lambda run=run: self._take(run)):
                self._go_on(run, "sent")
        return bool(actions)

    def _take(self, run: Run) -> None:
        """Take the samples of the tenant that have arrived, and score those that are not scored
        yet."""
        _member(run).take()
        run.score()

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

    def _next_action(self, run: Run) -> tuple[NextAction, str]:
        has_sent = self._progress[run.name].stage == "sent"
        try:
            return _member(run).next_action(has_sent=has_sent), ""
        except SERVICE_FAULTS:
            raise
        except Exception as error:
            return "wait", describe(error)

    def _train_next(self, name: str) -> None:
        run, progress = self._runs[name], self._progress[name]
        waited_s = time.monotonic() - progress.waits_since
        self._train(name)
        progress.stage = "new"
        self._num_updates += 1
        if self._coordinator is not None and name in self._runs:
            now = time.perf_counter()
            row = {"round": float(self._num_updates - 1), "time/round_s": now - self._row_since}
            row |= {"time/timestamp": time.time(), "service/queue_age_s": waited_s}
            self._row_since = now
            self._write_row(row | run.cost.metrics(name, waited_s), self._coordinator.take_times())
