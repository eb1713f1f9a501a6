"""Decides which prompts are leased to which worker, and which finished groups a step trains on.

The module does no I/O and has no threads or clock. A prompt has one state at any time: it waits, is
leased to a worker (which generates its group), is finished (its group is in the queue), was trained
on, or was dropped and counted. The rule that bounds the staleness is in `staleness.py`.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from mrl.scheduling.records import Finished, Lease, Partial, Tally
from mrl.scheduling.staleness import Bound

TOO_OLD = "too_old"
"""With `async.at_bound: drop`, groups that are too old are dropped, and counted under this cause."""


class Ledger:
    """Keeps the states of all prompts. It is not thread-safe."""

    def __init__(
        self,
        *,
        session: str,
        prompts_per_step: int,
        max_staleness: int,
        at_bound: Literal["wait", "drop"] = "wait",
    ) -> None:
        """`session` must be different each time a run is started, so that no lease id is used
        twice."""
        if prompts_per_step < 1 or max_staleness < 0 or ":" in session:
            raise ValueError(
                f"got {prompts_per_step=}, {max_staleness=}, {session=}; expected at least 1 and 0, "
                "and no colon"
            )
        self.bound = Bound(prompts_per_step, max_staleness)
        self._at_bound, self._session = at_bound, session
        self.step = 0
        """The first step that has not taken its groups yet."""
        self.tally = Tally()
        self._next_item = self._next_lease = 0
        self.prompts: dict[int, Any] = {}
        """The prompts that are neither trained on nor dropped, by id; a checkpoint needs them."""
        self.waiting: list[int] = []  # sorted, because prompts come back
        """The ids of the waiting prompts, in the order in which they are leased: the oldest
        first."""
        self.leases: dict[str, Lease] = {}
        """The current leases, by lease id."""
        self.finished: dict[int, Finished] = {}
        """The queue: finished groups that no step has trained on, by prompt id."""
        self.partials: dict[int, Partial] = {}
        """Partial rollouts of waiting and leased prompts, by prompt id; a checkpoint may keep
        them."""
        self._workers: set[int] = set()

    # Workers

    def join(self, worker: int) -> None:
        """Admit a worker. If a worker with the same number has joined earlier, the earlier one is
        treated as lost."""
        self.lose(worker)
        self._workers.add(worker)

    def lose(self, worker: int) -> list[Lease]:
        """Remove a worker, if it has joined, and end its leases; return these leases. Their prompts
        wait again, ahead of prompts that were drawn later."""
        self._workers.discard(worker)
        lost = [lease for lease in self.leases.values() if lease.worker == worker]
        for lease in lost:
            del self.leases[lease.lease_id]
            bisect.insort(self.waiting, lease.item_id)
        return lost

    # Prompts and leases

    def add(self, prompts: Iterable[Any]) -> list[int]:
        """Add prompts in the order in which they were drawn; return their ids."""
        added = dict(enumerate(prompts, self._next_item))
        self._next_item += len(added)
        self.prompts |= added
        self.waiting += added
        return list(added)

    def num_to_draw(self, version: int, most: int) -> int:
        """Return how many prompts must be added so that enough prompts wait for `lease(worker,
        version, most)`. Then `lease` returns fewer than `most` prompts only if the bound on
        staleness requires it."""
        return max(0, min(most, self.capacity(version)) - len(self.waiting))

    def capacity(self, version: int) -> int:
        """Return how many more groups may be started if the oldest token of each is of version
        `version`."""
        in_flight = [*self.leases.values(), *self.finished.values()]
        return self.bound.room(self.step, [each.oldest for each in in_flight], version)

    def lease(self, worker: int, version: int, most: int) -> list[Lease]:
        """Lease up to `most` prompts to a worker whose engine has weights of version `version`. The
        oldest prompts come first.

        If the returned list is empty, the worker has to wait for newer weights, for prompts, or
        until other groups are trained on. A partial rollout that is too old to be continued is
        discarded.

        Raises ValueError if the worker has not joined or the trainer has no such version.
        """
        if worker not in self._workers:
            raise ValueError(f"worker {worker} has not joined, or was lost; it has to join first")
        if not 0 <= version <= self.step:
            raise ValueError(
                f"worker {worker} asks with weights {version}, expected 0 to {self.step}: the trainer "
                "has no others"
            )
        free = self.capacity(version)
        granted: list[Lease] = []
        while self.waiting and len(granted) < min(most, free):
            item_id = self.waiting.pop(0)
            partial = self.partials.get(item_id)
            if partial and self.capacity(min(version, partial.oldest)) < 1:
                self.tally.discarded_tokens += self.partials.pop(item_id).num_tokens
                partial = None
            lease_id = f"{self._session}:{self._next_lease}"
            self._next_lease += 1
            self.tally.kept_tokens += partial.num_tokens if partial else 0
            lease = Lease(lease_id, item_id, self.prompts[item_id], worker, version, partial)
            self.leases[lease_id] = lease
            granted.append(lease)
        return granted

    def report(self, lease_id: str, partial: Partial) -> bool:
        """Keep the partial rollout of a leased prompt in case its worker is lost. Return False if
        the lease has ended. Raises ValueError for an impossible version."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return False
        lease.check_versions(partial.oldest, self.step, self.step)
        self.partials[lease.item_id] = partial
        return True

    def finish(
        self, lease_id: str, group: Any, *, oldest: int, newest: int, num_tokens: int
    ) -> bool:
        """Put a finished group into the queue; return False if the group was not kept.

        `oldest` and `newest` are the oldest and the newest version that sampled any of the group's
        tokens. A group whose lease has ended is a duplicate, which is dropped and counted. If a
        group is too old, its prompt waits to be leased again (`async.at_bound: wait`), or is
        dropped and counted (`drop`). Raises ValueError for impossible versions.
        """
        lease = self.leases.get(lease_id)
        if lease is None:
            self.tally.duplicates += 1
            self.tally.discarded_tokens += num_tokens
            return False
        lease.check_versions(oldest, newest, self.step)
        del self.leases[lease_id]
        self.partials.pop(lease.item_id, None)
        self.finished[lease.item_id] = Finished(lease.item_id, group, oldest, num_tokens)
        self._remove_too_old()
        return lease.item_id in self.finished

    def drop(self, lease_id: str, cause: str, num_tokens: int = 0) -> bool:
        """Drop a leased prompt, so that no step trains on it, and count it under `cause`. Return
        False if the lease has ended; then a duplicate is counted."""
        lease = self.leases.pop(lease_id, None)
        self.tally.discarded_tokens += num_tokens
        if lease is None:
            self.tally.duplicates += 1
            return False
        self.partials.pop(lease.item_id, None)
        self._forget(lease.item_id, cause)
        return True

    # Batches

    def take(self, version: int) -> list[Finished] | None:
        """Return the groups that step `version` trains on, in the order in which their prompts were
        drawn. Return None if the step has to wait. Raises ValueError if `version` is not the next
        step."""
        if version != self.step:
            raise ValueError(f"got step {version}, expected {self.step}, the next one")
        batch = self._batch()
        if batch is None:
            return None
        for group in batch:
            del self.finished[group.item_id], self.prompts[group.item_id]
        self.tally.staleness = Counter(version - group.oldest for group in batch)
        self.tally.trained += len(batch)
        self.step += 1
        self._remove_too_old()
        return sorted(batch, key=lambda group: group.item_id)

    def _batch(self) -> list[Finished] | None:
        leased = [lease.oldest for lease in self.leases.values()]
        if self._at_bound == "wait" and self.bound.makes_late(self.step, leased):
            return None
        size = self.bound.prompts_per_step
        ready = sorted(self.finished.values(), key=lambda group: (group.oldest, group.item_id))
        return ready[:size] if len(ready) >= size else None

    # Changes of state

    def _remove_too_old(self) -> None:
        for group in list(self.finished.values()):
            if self.bound.due(group.oldest) >= self.step:
                continue
            del self.finished[group.item_id]
            self.tally.discarded_tokens += group.num_tokens
            if self._at_bound == "drop":
                self._forget(group.item_id, TOO_OLD)
            else:
                bisect.insort(self.waiting, group.item_id)

    def _forget(self, item_id: int, cause: str) -> None:
        del self.prompts[item_id]
        self.tally.dropped[cause] += 1

    # Checkpoints and metrics

    def counts(self) -> dict[str, Any]:
        """Return the counts of the whole run, which `load` takes, as a JSON-serializable dict."""
        return {
            "tally": self.tally.state_dict(),
            "next_item": self._next_item,
            "next_lease": self._next_lease,
        }

    def load(
        self,
        counts: Mapping[str, Any],
        step: int,
        prompts: Mapping[int, Any],
        finished: Iterable[Finished],
        partials: Mapping[int, Partial],
    ) -> None:
        """Continue at `step` with the prompts and partial rollouts of a checkpoint, each by prompt
        id. `counts` is what `counts()` returned at the save. Workers stay joined, without leases.

        Prompts without a group in `finished` wait. If the recipe now has a smaller bound, a
        finished group may have become too old. Such a group is generated again or, with `at_bound:
        drop`, dropped and counted.
        """
        self.step, self.tally = step, Tally.restore(counts["tally"])
        self._next_item = counts["next_item"]
        self._next_lease = max(self._next_lease, counts["next_lease"])
        self.prompts, self.leases = dict(prompts), {}
        self.finished = {group.item_id: group for group in finished}
        self.waiting = sorted(item_id for item_id in prompts if item_id not in self.finished)
        self.partials = {i: partials[i] for i in self.waiting if i in partials}
        self._remove_too_old()

    def metrics(self) -> dict[str, float]:
        """Return metrics `async/*`: how many prompts are in each state now, and counts since the
        run began."""
        oldest = min((group.oldest for group in self.finished.values()), default=self.step)
        places = {
            "async/waiting_prompts": len(self.waiting),
            "async/leased_groups": len(self.leases),
            "async/queued_groups": len(self.finished),
            "async/queue_age": self.step - oldest,
        }
        counts = self.tally.metrics(self.bound.max_staleness)
        return {key: float(count) for key, count in places.items()} | counts
