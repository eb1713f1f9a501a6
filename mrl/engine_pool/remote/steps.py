"""Decides what the engines of rollout ranks generate before the trainer needs it.

`StepsAhead` draws the prompts of up to `async.max_staleness` further steps and assigns each batch
to the engines at once. Each batch is generated with the weights that are the newest when its
prompts are drawn. Thus no token is more than `async.max_staleness` versions old when a step trains
on it.

`LeasedSteps` lets workers ask for prompts. A worker gets prompts as long as the bound on staleness
allows more groups from its engine's weights. A step trains on the finished groups with the oldest
tokens. A checkpoint contains the finished groups that no step has trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mrl.collect.backlog import StepPrompts
from mrl.collect.collector import Collector
from mrl.collect.prompts import PromptSupply
from mrl.config.asynchronous import AsyncConfig
from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.remote.coordinator import Coordinator
from mrl.engine_pool.remote.lease_schedule import LeaseSchedule
from mrl.engine_pool.remote.messages import Delivered
from mrl.engine_pool.remote.pool import RemotePool, RemoteWork
from mrl.engine_pool.remote.rendezvous import Rendezvous, launcher_rendezvous
from mrl.preflight import Plan
from mrl.run.folder import RunFolder
from mrl.run.pending_prompts import PendingPrompt, pending_state, whole_batches
from mrl.scheduling.schedule import FixedSchedule
from mrl.system.clock import Clock
from parallel.mesh import Mesh


class _Batch(NamedTuple):
    """The prompts of a step, and the assignment by which the engines generate their groups."""

    prompts: StepPrompts
    work: RemoteWork


class StepsAhead:
    """Generates a fixed number of steps ahead. See `mrl.collect.base.StepSchedule`."""

    def __init__(self, plan: Plan, supply: PromptSupply, pool: RemotePool, mesh: Mesh) -> None:
        self._supply, self._pool, self._mesh = supply, pool, mesh
        self._recipe = plan.recipe
        self._ahead = plan.recipe.asynchronous.max_staleness
        self.batches: dict[int, _Batch] = {}
        """The batches of future steps, by step."""

    def begin_step(self, step: int) -> tuple[StepPrompts, RemoteWork]:
        last = min(step + self._ahead, max(step, self._recipe.train.num_steps - 1))
        for each in range(step, last + 1):
            if each not in self.batches:
                prompts = self._supply.step_prompts(each)
                self.batches[each] = _Batch(prompts, self._pool.assign(prompts, step))
        return self.batches.pop(step)

    def assign(self, prompts: StepPrompts, step: int) -> RemoteWork:
        return self._pool.assign(prompts, step)

    def wait_for_room(self, step: int, clock: Clock) -> None:
        self._pool.wait_for_room(step, clock)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Wait until all batches are generated, and return the pending prompts. The wait is needed
        because a resumed run no longer has the weights with which a batch has to be generated."""
        works = [batch.work for batch in self.batches.values()]
        self._pool.finish(works, step + 1)
        backlog = self._pool.gather([one.group for one in self._supply.backlog.waiting])
        return {} if self._mesh.rank else self._supply.pending(self._delivered(), backlog)

    def _delivered(self) -> list[PendingPrompt]:
        """Return the groups of all batches as pending prompts. Only rank 0 may call this. The first
        group of a batch carries the batch's number of failed samples, and the others carry 0."""
        coordinator = self._pool.coordinator
        assert coordinator is not None
        found: list[PendingPrompt] = []
        for _, batch in sorted(self.batches.items()):
            whole = Delivered()
            for work_id in batch.work.work_ids:
                whole.add(coordinator.peek(work_id)[0])
            groups, num_failed = whole.finish()
            found += [
                PendingPrompt(group, num_failed=0 if i else num_failed)
                for i, group in enumerate(groups)
            ]
        return found

    def take_up(
        self, waiting: list[PendingPrompt], step: int, state: Mapping[str, Any]
    ) -> list[PendingPrompt]:
        """Form batches for the next steps from scored groups that are not too old, and put the
        other prompts back into the supply. See `StepSchedule.take_up`."""
        batches, rest = whole_batches(waiting, step, self._recipe.rollout, self._ahead)
        for i, batch in enumerate(batches):
            prompts = StepPrompts([], len(batch), is_long_round=False, remaining=[])
            self.batches[step + i] = _Batch(prompts, self._pool.assign_finished(batch))
        return self._supply.take_up(rest)


class LeasedSteps:
    """Lets workers generate independently of the trainer's steps, with one lease per prompt. See
    `mrl.collect.base.StepSchedule`."""

    def __init__(self, plan: Plan, supply: PromptSupply, pool: RemotePool) -> None:
        self._supply, self._pool = supply, pool
        self._num_wanted = plan.recipe.rollout.prompts_per_step

    def begin_step(self, step: int) -> tuple[StepPrompts, RemoteWork]:
        if (coordinator := self._pool.coordinator) is not None:
            with coordinator.paused() as leases:
                leases.start(step)
        prompts = StepPrompts([], self._num_wanted, is_long_round=False, remaining=[])
        return prompts, self._pool.assign_leased()

    def assign(self, prompts: StepPrompts, step: int) -> RemoteWork:
        """Return an empty assignment: the engines have nothing to do here, because the lease
        schedule itself replaces zero-variance groups."""
        return RemoteWork([None if self._pool.coordinator is None else Delivered()])

    def wait_for_room(self, step: int, clock: Clock) -> None:
        """Return at once, because the trainer never waits for an engine."""

    def state_dict(self, step: int) -> dict[str, Any]:
        if (coordinator := self._pool.coordinator) is None:
            return {}
        with coordinator.paused() as leases:  # workers' messages draw prompts, too
            waiting = {"waiting": pending_state(leases.waiting()), "ledger": leases.ledger.counts()}
            return {**self._supply.cursor.state_dict(), **waiting}

    def take_up(
        self, waiting: list[PendingPrompt], step: int, state: Mapping[str, Any]
    ) -> list[PendingPrompt]:
        if (coordinator := self._pool.coordinator) is None:
            return []
        counts = state.get("ledger") or state.get("leases", {}).get("ledger")
        with coordinator.paused() as leases:
            return leases.resume(waiting, step, counts)


def make_remote_collector(
    plan: Plan, mesh: Mesh, folder: RunFolder, rendezvous: Rendezvous | None = None
) -> Collector:
    """Return the collector of a run whose engines are on separate ranks.

    `rendezvous` tells workers where the coordinator is. By default the workers are those of the
    launcher's rollout ranks.
    """
    recipe, supply = plan.recipe, PromptSupply(plan)
    is_free = recipe.asynchronous.is_free

    rendezvous = rendezvous or launcher_rendezvous(plan.roles.num_rollout, recipe.longest_wait_s)
    shared = rendezvous.membership

    def make_coordinator(hosts: Sequence[str]) -> Coordinator[Any]:
        own = Membership(plan.num_engines, recipe.rollout.tensor_parallel_size)
        membership = own if shared is None else shared
        schedule: LeaseSchedule | FixedSchedule = FixedSchedule(len(membership.serving()))
        if is_free:
            schedule = LeaseSchedule(recipe, supply.draw)
        is_shared = shared is not None
        return Coordinator(membership, recipe.asynchronous, hosts, schedule, is_shared=is_shared)

    pool = RemotePool(plan, mesh, folder, rendezvous, make_coordinator)
    steps = LeasedSteps(plan, supply, pool) if is_free else StepsAhead(plan, supply, pool, mesh)
    return Collector(plan, mesh, folder, supply, pool, steps)


def fixed_coordinator(
    membership: Membership, config: AsyncConfig, hosts: Sequence[str]
) -> Coordinator[FixedSchedule]:
    """Return the coordinator of a session, by which the engines of a service do each work item with
    exactly the weights that it names."""
    schedule = FixedSchedule(len(membership.serving()))
    return Coordinator(membership, config, hosts, schedule, is_shared=True)
