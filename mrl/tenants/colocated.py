"""A service whose engines are on the trainer's devices: rollout and training take turns.

A turn is a round: one rollout phase, in which the requests of all tenants share the engine, and then
one update of each tenant that has its samples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch.distributed as dist

from mrl.config import Recipe, ServiceConfig
from mrl.system.clock import Clock
from mrl.system.heartbeat import begin_step, phase
from mrl.tenants.accord import ALONE_S
from mrl.tenants.colocated_house import ColocatedHouse, TenantCollector
from mrl.tenants.phase_times import add_up, add_up_ranks, trainer_shares
from mrl.tenants.registry import Registry
from mrl.tenants.schedule import Phase
from mrl.tenants.service import SERVICE_FAULTS, Publish, Service, describe
from mrl.tenants.sessions.run import SessionRun
from mrl.tenants.tenant_run import TenantRun


class ColocatedRun(TenantRun):
    """A `ColocatedRun` gets its samples in the service's rollout phases."""

    def __init__(
        self,
        name: str,
        weight: float,
        recipe: Recipe,
        house: ColocatedHouse,
        incarnation: str,
    ) -> None:
        super().__init__(name, weight, recipe, dist.get_world_size(), house, incarnation)
        assert isinstance(self.collector, TenantCollector)
        self._live = self.collector
        rollout, prompts = self.plan.recipe.rollout, self.plan.prompts
        longest = max(len(prompt.token_ids) for prompt in prompts) + rollout.max_response_len
        self.tokens_of_step = rollout.prompts_per_step * rollout.samples_per_prompt * longest
        """The most tokens that a step of it can hold."""

    @property
    def has_samples(self) -> bool:
        """Whether nothing is left to be generated in this phase."""
        return self._live.is_over

    @property
    def num_remaining(self) -> int:
        """The tasks of this rank's engine that are not over."""
        return self._live.num_remaining

    def prepare_sync(self) -> None:
        """Compute what the engine must answer to the canaries. The base is on the device."""
        with self.clock.part("sync"):
            self.trainer.policy.mount(adapter_only=True)
            self._live.prepare_sync(self.trainer.policy)

    def send(self) -> None:
        """Send the adapter to the engine, which is awake."""
        with self.clock.part("sync"):
            self.trainer.policy.mount(adapter_only=True)
            self._live.send(self.trainer.policy, self.trainer.step)

    def check_sync(self) -> None:
        """Compare the engine's canaries with the trainer's, once its cache is awake."""
        with self.clock.part("sync"):
            self._live.check_sync()

    def generate(self) -> None:
        """Generate what is left of the round on this rank's engine. This is no collective."""
        self._live.generate(self.clock)

    def end_generation(self, *, was_lost: bool) -> None:
        """Find out whether the round is generated. `was_lost`: whether any engine was."""
        self._live.end_generation(was_lost=was_lost)


Runs = ColocatedRun | SessionRun


class ColocatedService(Service[Runs]):
    """Serves tenants in rounds."""

    def __init__(
        self,
        config: ServiceConfig,
        house: ColocatedHouse,
        registry: Registry | None,
        publish: Publish = lambda metrics: None,
    ) -> None:
        super().__init__(config, house, registry, publish)
        self._slot, self._base = house.slot, house.base
        self._own_house = house
        self._wanting: list[str] = []
        """Tenants that want samples, in the order in which they began to."""
        self._phase = Phase(config.lora.slots)
        self._round = 0

    def _new_run(self, name: str, weight: float, recipe: Recipe) -> ColocatedRun:
        return ColocatedRun(name, weight, recipe, self._own_house, self._opened[name])

    def _new_session(self, name: str, weight: float, recipe: Recipe) -> SessionRun:
        queue = None if self._registry is None else self._registry.operations
        agree = partial(self._accord.first, limit_s=ALONE_S)
        return SessionRun(self._opened[name], weight, recipe, self._own_house, queue, agree)

    def _forget(self, name: str) -> None:
        super()._forget(name)
        self._wanting = [each for each in self._wanting if each != name]

    def run_turn(self) -> None:
        """Collect the samples of all tenants at once, then train each with its own."""
        begin_step(self._round)
        self._slot.begin_step()
        clock = Clock()
        wanting = (name for name, run in self._runs.items() if run.wants_turn)
        self._wanting += [name for name in wanting if name not in self._wanting]
        members = self._members()
        times = self._collect([self._runs[name] for name in members], clock)
        with clock.part("train"):
            waits = self._train_all([run for run in self._present(members) if run.trains])
        times = add_up_ranks(times)
        if self._is_main:
            self._write_row(self._row(members, waits, clock) | self._engine_metrics(times))
        for run in [run for run in self._present(members) if run.is_over]:
            self._finish(run)
        self._wanting = [name for name in self._wanting if name not in members]
        self._round += 1

    def _members(self) -> list[str]:
        """Return who takes part in the next rollout phase."""
        self._wanting = [name for name in self._wanting if name in self._runs]
        wanting = {name: self._runs[name].tokens_of_step for name in self._wanting}
        capacity = self._config.rollout.max_total_tokens
        return self._phase.start(capacity or sum(wanting.values()), wanting)

    def _collect(self, runs: Sequence[Runs], clock: Clock) -> dict[str, float]:
        """Generate and score the samples of one step of each tenant. Return what passed the gate of
        this rank's engine meanwhile, as `GateTimes` does."""
        names, times = [run.name for run in runs], []
        for run in runs:
            self._attempt(run, run.begin)
        while open_runs := [run for run in self._present(names) if not run.has_samples]:
            slot = self._slot
            slot.is_needed = any(run.num_remaining for run in open_runs)
            with clock.part("sync"):
                self._sync(open_runs)
            with clock.part("rollout"):
                self._own_house.take_times()  # the time before the phase is not part of it
                self._generate([run for run in open_runs if run.name in self._runs])
                times.append(self._own_house.take_times())
                slot.sleep()
            was_lost = slot.replace_lost(clock)
            with clock.part("score"):
                for run in [run for run in open_runs if run.name in self._runs]:
                    run.end_generation(was_lost=was_lost)
                    self._attempt(run, run.score)
        return add_up(times)

    @phase("sync")
    def _sync(self, runs: Sequence[Runs]) -> None:
        """Give the device to the engine, which then holds the adapters of these tenants."""
        self._base.onload()
        for run in runs:
            self._attempt(run, run.prepare_sync)
        self._base.give_back()  # what the swaps have left
        dist.barrier()  # an engine wakes on the devices of several ranks
        self._slot.wake_weights()
        for run in [run for run in runs if run.name in self._runs]:
            self._attempt(run, run.send)
        self._base.unmount()
        self._base.offload()
        dist.barrier()
        self._slot.wake_cache()
        for run in [run for run in runs if run.name in self._runs]:
            self._attempt(run, run.check_sync)

    @phase("rollout")
    def _generate(self, runs: Sequence[Runs]) -> None:
        """Generate for all tenants at once, each in a thread of its own."""
        failures = dict.fromkeys((run.name for run in runs), "")

        def generate(run: Runs) -> None:
            try:
                run.generate()
            except SERVICE_FAULTS:
                raise
            except Exception as error:
                failures[run.name] = describe(error)

        with ThreadPoolExecutor(max(1, len(runs)), thread_name_prefix="tenant") as pool:
            for future in [pool.submit(generate, run) for run in runs]:
                future.result()
        for run in runs:
            if failure := self._first(failures[run.name]):
                self._pause(run, failure)

    def _train_all(self, runs: Sequence[Runs]) -> dict[str, float]:
        """Train each tenant with what was collected for it, in the order of the queue; return how long
        each has waited for it, in seconds."""
        self._base.onload()
        now, waits = time.time(), {}
        for run in runs:
            self._queue.ready(run.name, now)
        while name := self._next():
            waits[name] = time.time() - now
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
            row |= run.metrics(waits[run.name])
        return row | trainer_shares({run.name: run.trainer_s for run in trained})
