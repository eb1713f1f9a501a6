"""This module collects a step's groups from workers that run freely, each prompt under a lease.

Workers ask for prompts whenever the bound has room for the weights of their engines, and a step trains
on the finished groups with the oldest weights. What is in the queue stays there over a save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.collect.backlog import StepPrompts
from mrl.collect.rounds import Round, RoundCollector
from mrl.disaggregated.collector import DisaggregatedCollector, Outlook
from mrl.disaggregated.lease_server import LeaseServer
from mrl.disaggregated.server import Server
from mrl.run.pending_prompts import PendingPrompt, pending_state
from mrl.system.clock import Clock
from mrl.system.heartbeat import phase


class FreeCollector(DisaggregatedCollector):
    """Collects the groups of a free-running run. See `mrl.collect.base.Collector`."""

    _leases: LeaseServer | None = None
    """The server, on rank 0."""

    def _make_server(self, hosts: list[str]) -> LeaseServer:
        plan = self.plan
        self._leases = LeaseServer(plan.num_engines, plan.recipe, hosts, self.prompt_queue.next)
        return self._leases

    def begin(self, step: int, clock: Clock) -> None:
        if self._leases is not None:
            self._leases.start_leases(step)
        RoundCollector.begin(self, step, clock)  # no engine is waited for

    def _step_prompts(self) -> StepPrompts:
        wanted = self.plan.recipe.rollout.prompts_per_step
        return StepPrompts([], wanted, is_long_round=False, remaining=[])

    def _new_round(self, prompts: StepPrompts | None, evaluates: int | None = None) -> Round:
        started = super()._new_round(None, evaluates)
        started.prompts = prompts
        if prompts is not None:
            started.scored = self._new_delivered()
        return started

    @phase("rollout")
    def rollout(self, clock: Clock) -> None:
        assert self._round is not None
        with clock.part("rollout"):
            if self._round.prompts is not None and not self._take_batch():
                return
            if not self._wait_for(self._work_ids, self._step):
                return
            if self._leases is not None:
                self._take(self._leases, 0)
            self._share_measured()
            self._round.is_generated = True

    def _take_batch(self) -> bool:
        """Take the groups of the step from the queue, once; return False where weights are to be sent
        first. A collective."""

        def take(_: Server) -> bool:
            if self._leases is not None and not self._has_batch:
                with self._waits():
                    batch = self._leases.wait_for_batch(self._step)
                if batch is not None:
                    self._delivered[-1].add(batch)
                    self._has_batch = True
            return self._has_batch

        self._has_batch = self._from_server(take)
        return self._has_batch

    def outlook(self, version: int, *, has_sent: bool) -> Outlook:
        assert self._leases is not None
        assert self._round is not None
        seen = self._leases.look(self._work_ids, version)
        if seen.can_send and not has_sent:
            return "send"
        if self._round.prompts is not None and not self._has_batch:
            batch = self._leases.take_batch(self._step)
            if batch is None:
                return "send" if seen.can_send else "wait"
            self._delivered[-1].add(batch)
            self._has_batch = True
        if seen.is_delivered:
            return "take"
        return "send" if seen.can_send else "wait"

    def _forget(self) -> None:
        super()._forget()
        self._has_batch = False

    def state_dict(self) -> dict[str, Any]:
        if self._leases is None:
            return {}
        with self._leases.paused() as leasing:  # prompts are drawn at any time
            own = {"waiting": pending_state(leasing.waiting()), "ledger": leasing.counts()}
            return {**self.cursor.state_dict(), **own}

    def _take_up(
        self, waiting: list[PendingPrompt], step: int, state: Mapping[str, Any]
    ) -> list[PendingPrompt]:
        if self._leases is not None:
            counts = state.get("ledger") or state.get("leases", {}).get("ledger")
            with self._leases.paused() as leasing:
                return leasing.take_up(waiting, step, counts)
        return []
