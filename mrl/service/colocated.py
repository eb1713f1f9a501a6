"""A service whose engines are on the trainer's devices: rollout and training take turns.

Each turn of the service is called a round. A round has one rollout phase, in which the requests of
several tenants share the engine, and then one update of each tenant whose samples are complete.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from mrl.engine_pool.local import LocalPool, remaining
from mrl.exchange.sharing import share_bytes
from mrl.service.consensus import SERVICE_FAULTS, describe
from mrl.service.local_engine import SharedLocalEngine
from mrl.service.metrics import add_up, trainer_shares
from mrl.service.registry import Registry
from mrl.service.schedule import Phase
from mrl.service.service import Publish, Run, Service
from mrl.service.sessions.local_sampling import LocalSampling
from mrl.service.sessions.run import SessionRun
from mrl.service.shared import SharedResources
from mrl.service.tenant_run import TenantRun
from mrl.system.clock import Clock
from mrl.system.heartbeat import begin_step, phase
from parallel.policy import Policy


class RecipeMember:
    """Represents a tenant with a recipe in the rollout phases of a colocated service.

    The service itself runs the training loop of such a tenant. The class has the methods and
    properties that a rollout phase uses. For a session, which is the other kind of tenant,
    `LocalSampling` has the same methods and properties. All of the methods except `generate` are
    collectives.
    """

    def __init__(self, run: TenantRun) -> None:
        pool = run.collector.pool
        assert isinstance(pool, LocalPool)
        self._run, self._pool, self._part = run, pool, pool.part

    @property
    def _assignments(self) -> list[Any]:
        current = self._run.collector.round
        return [] if current is None else current.assignments

    @property
    def has_samples(self) -> bool:
        return self._run.collector.is_over

    @property
    def num_remaining(self) -> int:
        return len(remaining(self._assignments))

    def prepare_sync(self) -> None:
        with self._syncing() as policy:
            self._part.prepare_sync(policy)

    def send(self) -> None:
        with self._syncing() as policy:
            self._part.send(policy, self._run.step)
            self._part.raise_failures()

    @contextmanager
    def _syncing(self) -> Iterator[Policy]:
        """Bring the tenant's adapter to the device, and yield the tenant's policy. The duration of
        the `with` block is counted as sync time."""
        with self._run.clock.part("sync"):
            policy = self._run.trainer.policy
            policy.mount(adapter_only=True)
            yield policy

    def check_sync(self) -> None:
        with self._run.clock.part("sync"):
            self._part.check_sync()

    def generate(self) -> None:
        self._pool.generate(self._assignments, self._run.step, self._run.clock)

    def end_generation(self, *, was_lost: bool) -> None:
        current = self._run.collector.round
        assert current is not None
        current.is_generated = self._pool.end_generation(current.assignments, was_lost)


def _member(run: Run) -> LocalSampling | RecipeMember:
    """Return the object that represents the tenant of `run` in rollout phases."""
    if not isinstance(run, SessionRun):
        return RecipeMember(run)
    assert isinstance(run.sampler.engines, LocalSampling)
    return run.sampler.engines


class ColocatedService(Service):
    """Serves tenants in rounds: one rollout phase, then updates."""

    def __init__(
        self,
        shared: SharedResources[SharedLocalEngine],
        registry: Registry | None,
        publish: Publish,
    ) -> None:
        super().__init__(shared, registry, publish)
        self._base, self._local = shared.base, shared.engines
        self._engine = shared.engines.engine
        self._wanting: dict[str, None] = {}
        """The names of the tenants that wait for a rollout phase, in the order in which they began
        to wait. The dict is used as an ordered set."""
        self._phase = Phase(shared.config.lora.slots)
        self._round = 0

    def _forget(self, name: str) -> None:
        super()._forget(name)
        self._wanting.pop(name, None)

    def run_turn(self) -> None:
        """Run one rollout phase for several tenants. Then train each of these tenants whose
        property `trains` is true."""
        begin_step(self._round)
        self._engine.begin_step()
        clock = Clock()
        self._wanting |= dict.fromkeys(n for n, run in self._runs.items() if run.wants_turn)
        members = self._members()
        times = self._collect([self._runs[name] for name in members], clock)
        with clock.part("train"):
            waits = self._train_all([run for run in self._present(members) if run.trains])
        times = add_up(json.loads(each) for each in share_bytes(json.dumps(times).encode()))
        if self._is_main:
            self._write_row(self._row(members, waits, clock), times)
        for run in self._present(members):
            if run.is_over:
                self._finish(run)
        for name in members:
            self._wanting.pop(name, None)
        self._round += 1

    def _members(self) -> list[str]:
        """Return the names of the tenants that take part in the next rollout phase."""
        wanting = {name: self._runs[name].tokens_of_step for name in self._wanting}
        capacity = self._config.rollout.max_total_tokens
        return self._phase.start(capacity or sum(wanting.values()), wanting)

    def _collect(self, runs: Sequence[Run], clock: Clock) -> dict[str, float]:
        """Generate and score one step's samples for each tenant. Return statistics that say how
        full this rank's engine was while it generated, and whose requests filled it (see
        `GateTimes`)."""
        names, times = [run.name for run in runs], []
        for run in runs:
            self._attempt(run, run.begin)
        while open_runs := [run for run in self._present(names) if not _member(run).has_samples]:
            engine = self._engine
            engine.is_needed = any(_member(run).num_remaining for run in open_runs)
            with clock.part("sync"):
                self._sync(open_runs)
            with clock.part("rollout"):
                self._local.take_times()  # discards the time before this phase
                self._generate(self._present(run.name for run in open_runs))
                times.append(self._local.take_times())
                engine.sleep()
            was_lost = engine.replace_lost(clock)
            with clock.part("score"):
                for run in self._present(run.name for run in open_runs):
                    _member(run).end_generation(was_lost=was_lost)
                    self._attempt(run, run.score)
        return add_up(times)

    @phase("sync")
    def _sync(self, runs: Sequence[Run]) -> None:
        """Wake the engine, send these tenants' adapters to it, and move the base model off the
        device."""
        self._base.onload()
        for run in runs:
            self._attempt(run, _member(run).prepare_sync)
        self._base.give_back()  # the device memory that the swaps have freed
        dist.barrier()  # an engine takes memory on several ranks
        self._engine.wake_weights()
        for run in runs:
            self._attempt(run, _member(run).send)
        self._base.unmount()
        self._base.offload()
        dist.barrier()
        self._engine.wake_cache()
        for run in runs:
            self._attempt(run, _member(run).check_sync)

    @phase("rollout")
    def _generate(self, runs: Sequence[Run]) -> None:
        """Generate the samples of all these tenants at the same time, with one thread per tenant. A
        tenant whose generation fails on any rank is paused."""

        def failure_of(run: Run) -> str:
            try:
                _member(run).generate()
            except SERVICE_FAULTS:
                raise
            except Exception as error:
                return describe(error)
            return ""

        with ThreadPoolExecutor(max(1, len(runs)), thread_name_prefix="tenant") as pool:
            failures = list(pool.map(failure_of, runs))
        for run, own in zip(runs, failures, strict=True):
            if failure := self._consensus.first(own):
                self._pause(run, failure)

    def _train_all(self, runs: Sequence[Run]) -> dict[str, float]:
        """Train each tenant on its samples, in the order of the training queue. Return, by tenant,
        the seconds from the start of training in this round to the start of the tenant's update."""
        self._base.onload()
        now, waits = time.monotonic(), {}
        for run in runs:
            self._queue.ready(run.name, now)
        while name := self._next():
            waits[name] = time.monotonic() - now
            self._train(name)
        return waits

    def _row(
        self, members: Sequence[str], waits: Mapping[str, float], clock: Clock
    ) -> dict[str, float]:
        """Return the metrics of a round."""
        row: dict[str, float] = {"round": self._round, "service/phase_tenants": len(members)}
        row |= {f"time/{name}_s": seconds for name, seconds in clock.seconds.items()}
        row |= {"time/round_s": clock.elapsed_s, "time/timestamp": time.time()}
        row["service/queue_age_s"] = max(waits.values(), default=0.0)
        trained = self._present(waits)
        for run in trained:
            row |= run.cost.metrics(run.name, waits[run.name])
        return row | trainer_shares({run.name: run.cost.trainer_s for run in trained})
