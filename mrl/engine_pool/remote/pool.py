"""The pool of engines on separate ranks, as the trainer sees it.

Only rank 0 has connections to the workers. The other trainer ranks take part in collectives and
send weights to the workers that are assigned to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from mrl.collect.backlog import StepPrompts
from mrl.collect.collector import as_statistics
from mrl.engine_pool.engine_nodes import served_adapter
from mrl.engine_pool.metrics import join_rounds
from mrl.engine_pool.remote.coordinator import Coordinator
from mrl.engine_pool.remote.engine_times import Span
from mrl.engine_pool.remote.link import EngineLink
from mrl.engine_pool.remote.messages import Delivered, Work
from mrl.engine_pool.remote.rendezvous import Rendezvous
from mrl.preflight import Plan
from mrl.run.activities import WAIT
from mrl.run.folder import RunFolder
from mrl.run.pending_prompts import PendingPrompt, renumbered
from mrl.scheduling.staleness import count_by_staleness
from mrl.system.clock import Clock
from mrl.system.heartbeat import phase
from mrl.system.processes import Closing
from mrl.types import SampleGroup, Statistics
from mrl.weight_sync.delta import Traffic
from parallel.mesh import Mesh
from parallel.policy import Policy

NextAction = Literal["send", "take", "wait"]
"""What a service does next for a tenant: send the weights, take the samples, or wait for the
engines."""
T = TypeVar("T")


@dataclass
class RemoteWork:
    """A batch or an evaluation that the engines generate: a `mrl.collect.base.Assignment`."""

    scored: list[Delivered | None]
    """The groups that workers have delivered: one entry for a batch, or one for each evaluation
    set. The entries are None on ranks other than 0."""
    work_ids: list[int] = field(default_factory=list)
    """The ids of the assignment's work items, one for each engine; empty on ranks other than 0."""
    is_leased: bool = False
    """Whether the groups come from the queue of groups that workers have finished under leases. (A
    lease lets one worker generate the group of one prompt.) The value is the same on all ranks."""
    is_taken: bool = False
    """Whether the groups were taken from the queue of finished groups; only set on rank 0."""

    def add(self, part: int, delivered: Delivered) -> None:
        """Add to `scored[part]` the groups that one engine has delivered. `part` is 0 for a batch,
        and the index of the evaluation set for an evaluation."""
        whole = self.scored[part]
        assert whole is not None
        whole.add(delivered)


class RemotePool:
    """The engines of rollout ranks, for one policy. See `mrl.collect.base.Pool`."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        folder: RunFolder,
        rendezvous: Rendezvous,
        make_coordinator: Callable[[Sequence[str]], Coordinator[Any]],
    ) -> None:
        """`folder` has the socket through which engines are added and removed, unless tenants share
        the engines. `make_coordinator` is called on rank 0 with the hosts of the rollout ranks.
        `rendezvous` tells the workers the coordinator's address."""
        self._plan, self._mesh, self._folder, self._rendezvous = plan, mesh, folder, rendezvous
        self.start_text = (
            "joining the service's engines"
            if rendezvous.is_shared
            else "starting the engines of the rollout ranks"
        )
        self._control: Closing | None = None
        self._link = EngineLink(
            plan.recipe,
            mesh,
            plan.prompts,
            rendezvous,
            make_coordinator,
            sends_adapter=served_adapter(plan) is not None,
        )
        self._measured: dict[str, float] = {}
        self._wait_s = 0.0
        """Seconds that this rank has waited for engines in this step."""
        self._policy: Policy | None = None

    @property
    def coordinator(self) -> Coordinator[Any] | None:
        """The object to which the workers connect; None on ranks other than 0."""
        return self._link.coordinator

    @coordinator.setter
    def coordinator(self, coordinator: Coordinator[Any] | None) -> None:
        self._link.coordinator = coordinator

    @property
    def is_shared(self) -> bool:
        """Whether policies of several tenants share the engines. In that case, no method waits for
        engines, and the service calls `next_action`."""
        return self._rendezvous.is_shared

    @phase("start")
    def start(self, policy: Policy) -> None:
        self._link.open()
        if self.is_shared:
            return
        if self.coordinator is not None:
            from mrl.engine_pool.elastic.control import open_control  # with the HTTP library

            self._control = open_control(self._folder.root, self.coordinator.membership)
            self.coordinator.wait_until_started(self._plan.recipe.rollout.start_timeout_s)
            self.coordinator.times.restart()
        dist.barrier()

    def ask_coordinator(self, ask: Callable[[Coordinator[Any]], T]) -> T:
        """Call `ask` with rank 0's coordinator: see `EngineLink.ask_coordinator`."""
        return self._link.ask_coordinator(ask)

    def begin_step(self) -> None:
        self._measured, self._link.traffic, self._wait_s = {}, Traffic(), 0.0

    def wait_for_room(self, step: int, clock: Clock) -> None:
        """Wait until the coordinator's schedule lets the trainer send the weights of `step`.

        A collective. It returns at once if several tenants share the engines.
        """
        if self.is_shared:
            return
        with phase("rollout"), clock.part("rollout"):
            with self._waiting():
                if self.coordinator is not None:
                    self.coordinator.wait_until_free(step)
            dist.barrier()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Add the time that the `with` statement takes to the time for which this rank waited for
        engines."""
        begin = time.perf_counter()
        yield
        self._wait_s += time.perf_counter() - begin

    def assign(self, prompts: StepPrompts, version: int) -> RemoteWork:
        assigned = RemoteWork([self._new_delivered()])

        def make(work_id: int, engine: int, part: int, num_parts: int) -> Work | None:
            started, num_wanted = prompts.share(part, num_parts)
            if not started:
                return None
            return Work(work_id, engine, "batch", version, num_wanted, tuple(started))

        if self.coordinator is not None:
            assigned.work_ids = self.coordinator.assign_parts(make)
        return assigned

    def assign_leased(self) -> RemoteWork:
        """Return an assignment for groups that workers finish under leases, one lease per prompt.
        `rollout` adds the groups later."""
        return RemoteWork([self._new_delivered()], is_leased=True)

    def assign_finished(self, batch: Sequence[PendingPrompt]) -> RemoteWork:
        """Return an assignment that is delivered already: the groups of `batch` were generated and
        scored before the run was resumed."""
        assigned = RemoteWork([self._new_delivered()])
        if self.coordinator is not None:
            groups = [renumbered(one.group, i) for i, one in enumerate(batch)]
            num_failed = sum(one.num_failed for one in batch)
            assigned.work_ids.append(self.coordinator.put(Delivered(groups, num_failed)))
        return assigned

    def assign_evaluation(self, version: int) -> RemoteWork:
        assigned = RemoteWork([self._new_delivered() for _ in self._plan.eval_sets])

        def make(work_id: int, engine: int, part: int, num_parts: int) -> Work:
            return Work(work_id, engine, "evaluation", version, part=part, num_parts=num_parts)

        if self.coordinator is not None:
            assigned.work_ids = self.coordinator.assign_parts(make)
        return assigned

    def _new_delivered(self) -> Delivered | None:
        return None if self.coordinator is None else Delivered()

    def sync(self, policy: Policy, version: int) -> None:
        self._policy = policy
        if self._link.sync(policy, version) and self._plan.recipe.rollout.max_deltas > 0:
            self._measured |= self._link.traffic.metrics()

    def rollout(self, assignments: Sequence[RemoteWork], step: int, clock: Clock) -> bool:
        with clock.part("rollout"):
            for each in assignments:
                if each.is_leased and not self._take_leased(each, step):
                    return False
            if not self.wait_for(work_ids(assignments), step):
                return False
            if self.coordinator is not None:
                self._take(self.coordinator, assignments)
            self._share_measured()
            return True

    def _take_leased(self, assigned: RemoteWork, step: int) -> bool:
        """Take the groups of a step from the queue of finished groups, and return True. Return
        False if weights must be sent first. A collective."""

        def take(coordinator: Coordinator[Any]) -> bool:
            if not assigned.is_taken:
                with self._waiting():
                    batch = coordinator.wait_until(lambda leases: leases.take(step), step)
                _accept(assigned, batch)
            return assigned.is_taken

        return self.ask_coordinator(take)

    def _take(self, coordinator: Coordinator[Any], assignments: Sequence[RemoteWork]) -> None:
        """Move the delivered groups of each assignment's work items from the coordinator into the
        assignment."""
        for each in assignments:
            for work_id in each.work_ids:
                for part, delivered in coordinator.take(work_id).items():
                    each.add(part, delivered)

    def _share_measured(self) -> None:
        """Share the metrics of the workers and the coordinator with all ranks. A collective."""
        measured: list[Any] = [{}]
        if self.coordinator is not None:
            added = join_rounds(self._measured, self.coordinator.metrics())
            measured = [{**added, WAIT: self._wait_s}]
        dist.broadcast_object_list(measured)
        self._measured = measured[0]

    def wait_for(self, ids: list[int], version: int) -> bool:
        """Wait until the groups of the work items `ids` are delivered, and return True. Return
        False if the weights `version` must be sent to workers first. A collective."""
        with self._waiting():
            return self.ask_coordinator(lambda coordinator: coordinator.wait_for(ids, version))

    def finish(self, assignments: Sequence[RemoteWork], version: int) -> None:
        """Wait until the work items of `assignments` are delivered. Meanwhile, send the weights
        `version` to workers that become ready to receive them. A collective."""
        while not self.wait_for(work_ids(assignments), version):
            assert self._policy is not None
            self.sync(self._policy, version)

    def next_action(
        self, assignments: Sequence[RemoteWork], step: int, *, has_sent: bool
    ) -> NextAction:
        """Return `send` or `take` if that can be done now, otherwise `wait`. Call this on rank 0
        only.

        `has_sent`: whether the weights of `step` were already sent in the current round of rollouts.
        Raises the same errors as `Coordinator.wait_for`.
        """
        assert self.coordinator is not None
        seen = self.coordinator.poll(work_ids(assignments), step)
        sends = "send" if seen.can_send else "wait"
        if self._plan.recipe.asynchronous.is_free:
            if seen.can_send and not has_sent:
                return "send"
            for each in assignments:
                if each.is_leased and not each.is_taken:
                    with self.coordinator.paused() as leases:
                        _accept(each, leases.take(step))
                    if not each.is_taken:
                        return sends
        elif not has_sent:
            return "send" if seen.can_proceed else "wait"
        return "take" if seen.is_delivered else sends

    def gather(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        return list(groups)  # rank 0 has the tokens of all groups

    def statistics(self, groups: Sequence[SampleGroup], step: int) -> Statistics:
        ahead = self._plan.recipe.asynchronous.max_staleness
        return as_statistics(self._measured | count_by_staleness(groups, step, ahead))

    def engine_spans(self) -> list[list[Span]]:
        return [] if self.coordinator is None else self.coordinator.times.take_spans()

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        self._link.close()


def _accept(assigned: RemoteWork, batch: Delivered | None) -> None:
    """If `batch` is not None, add its sample groups to the assignment and mark the assignment as
    taken."""
    if batch is not None:
        assigned.add(0, batch)
        assigned.is_taken = True


def work_ids(assignments: Sequence[RemoteWork]) -> list[int]:
    """Return the ids of all work items in these assignments; empty on ranks other than 0."""
    return [work_id for each in assignments for work_id in each.work_ids]
