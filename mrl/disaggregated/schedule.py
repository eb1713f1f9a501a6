"""This module is the ledger of a fixed schedule: `async.deterministic`, and the bound 0.

Batch s is prompts s * B to (s + 1) * B - 1 in the order of the cursor. Version max(0, s - n) generates
all of it. Engine r of R has every R-th prompt, its *share*, and generates a share in one call, as
`StepPrompts.share` of mrl/collect/backlog.py deals them out. What an engine generates then depends on
the recipe alone and never on which worker was faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mrl.disaggregated.ledger import Ledger
from mrl.disaggregated.records import Finished, Lease, Partial
from mrl.errors import EngineGone, InputError


class ScheduledLedger(Ledger):
    """This ledger gives out whole shares, each to its engine at the version that the schedule names.

    A share whose worker is lost is generated anew as a whole, in one call again. The trainer may
    replace the weights `version - 1` of the engines, or save a checkpoint of `version`, when
    `num_owed(version)` is 0: a resumed run has no older weights.
    """

    def __init__(
        self, *, session: str, prompts_per_step: int, max_staleness: int, num_engines: int
    ) -> None:
        super().__init__(
            session=session,
            prompts_per_step=prompts_per_step,
            max_staleness=max_staleness,
            max_in_flight=(max_staleness + 1) * prompts_per_step,
        )
        self._num_engines = num_engines

    def generating_version(self, batch: int) -> int:
        """Return the version that generates batch `batch`."""
        return max(0, batch - self._bound.max_staleness)

    def num_to_draw(self, version: int, most: int = 0) -> int:
        """Return how many prompts to add before an engine of `version` can have its last share."""
        last = self._bound.due(version)
        return max(0, (last + 1) * self._bound.prompts_per_step - self._next_item)

    def num_owed(self, version: int) -> int:
        """Return how many prompts of the batches that older versions generate are not finished."""
        size = self._bound.prompts_per_step
        batches = range(self.step, self._bound.due(version))
        ids = [i for b in batches for i in range(b * size, (b + 1) * size)]
        return sum(item_id not in self._finished for item_id in ids)

    def lease(self, worker: int, version: int, most: int = 0) -> list[Lease]:
        """Lease the next share of engine `worker`, whole, whatever `most` is.

        An empty list means: wait, until the prompts are drawn, the engine has newer weights, or the
        share before this one is finished. Raises EngineGone where the engine's weights are too new for
        a share that it has not finished.
        """
        self._check_worker(worker, version)
        if any(lease.worker == worker for lease in self._leases.values()):
            return []
        waiting = set(self._waiting)
        for batch in range(self.step, self._bound.due(version) + 1):
            share = self._share(batch, worker)
            if waiting.isdisjoint(share):
                continue
            wanted = self.generating_version(batch)
            if version > wanted:
                raise EngineGone(
                    f"weights {wanted} have to generate batch {batch}, and engine {worker} has weights "
                    f"{version}: a run with a fixed schedule cannot replace a worker that is lost in "
                    "the middle of a share; resume it from its last checkpoint"
                )
            if not waiting.issuperset(share):
                return []
            self._waiting = [each for each in self._waiting if each not in share]
            return [self._grant(item_id, worker, version) for item_id in share]
        return []

    def report(self, lease_id: str, partial: Partial) -> bool:
        """Keep nothing: what is continued would not be what one call generates."""
        return lease_id in self._leases

    def finish(
        self, lease_id: str, group: Any, *, oldest: int, newest: int, num_tokens: int
    ) -> bool:
        """Put a finished group into the queue as `Ledger.finish` does; all of its tokens must be of the
        lease's version."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.check_versions(oldest, newest, lease.version)
        return super().finish(lease_id, group, oldest=oldest, newest=newest, num_tokens=num_tokens)

    def drop(self, lease_id: str, cause: str, num_tokens: int = 0) -> bool:
        """Refuse: ValueError. Another prompt would move all batches that follow."""
        raise ValueError(f"a fixed schedule cannot drop prompts (lease {lease_id}, cause {cause})")

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"schedule": self._schedule()}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        prompts: Mapping[int, Any],
        groups: Mapping[int, Any],
        partials: Mapping[int, Partial] | None = None,
    ) -> None:
        """Continue as `Ledger.load_state_dict` does. Raises InputError where the schedule differs."""
        if state.get("schedule") != self._schedule():
            raise InputError(
                f"the checkpoint has the schedule {state.get('schedule')} of batches and versions, the "
                f"recipe has {self._schedule()}: resume with the recipe of the checkpoint"
            )
        super().load_state_dict(state, prompts, groups)
        self._discard_broken_shares(self._waiting)

    def _schedule(self) -> dict[str, int]:
        return {
            "prompts_per_step": self._bound.prompts_per_step,
            "max_staleness": self._bound.max_staleness,
            "num_engines": self._num_engines,
        }

    def _share(self, batch: int, engine: int) -> range:
        size = self._bound.prompts_per_step
        return range(batch * size + engine, (batch + 1) * size, self._num_engines)

    def _batch(self) -> list[Finished] | None:
        size = self._bound.prompts_per_step
        ids = range(self.step * size, (self.step + 1) * size)
        if any(item_id not in self._finished for item_id in ids):
            return None
        return [self._finished[item_id] for item_id in ids]

    def _take_back(self, leases: Iterable[Lease]) -> None:
        leases = list(leases)
        super()._take_back(leases)
        self._discard_broken_shares([lease.item_id for lease in leases])

    def _discard_broken_shares(self, waiting: Iterable[int]) -> None:
        """Discard the finished groups of shares of which some prompt waits again."""
        for item_id in list(waiting):
            batch, place = divmod(item_id, self._bound.prompts_per_step)
            for other in self._share(batch, place % self._num_engines):
                if other in self._finished:
                    self._discard_group(other)
