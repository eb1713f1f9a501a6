"""This module decides which worker generates which prompt, and which finished groups a step trains on.

It is pure logic without IO, threads or a clock. A prompt is in one place at any time: it waits, is
leased to a worker, is finished (in the queue), trained on, or dropped and counted. `admission.py` has
the rule that keeps the bound and shows why nothing can deadlock.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from mrl.disaggregated.admission import Bound
from mrl.disaggregated.members import Members, Worker
from mrl.disaggregated.records import Finished, Lease, Partial
from mrl.disaggregated.tally import Tally

TOO_OLD = "too_old"
"""The cause under which `at_bound: drop` counts what is beyond the bound."""


class Ledger:
    """Keeps the places of all prompts. It is not safe for several threads."""

    def __init__(
        self,
        *,
        session: str,
        prompts_per_step: int,
        max_staleness: int,
        max_in_flight: int,
        at_bound: Literal["wait", "drop"] = "wait",
    ) -> None:
        """`session` is another one in each run of the job; `max_in_flight` bounds the leased groups."""
        if prompts_per_step < 1 or max_in_flight < 1 or max_staleness < 0 or ":" in session:
            raise ValueError(
                f"got {prompts_per_step=}, {max_in_flight=}, {max_staleness=}, {session=}; expected at "
                "least 1, 1 and 0, and no colon"
            )
        self._bound = Bound(prompts_per_step, max_staleness)
        self._max_in_flight, self._at_bound, self._session = max_in_flight, at_bound, session
        self.step = 0
        """The next step that has no batch yet."""
        self.tally = Tally()
        self._next_item = self._next_lease = 0
        self._prompts: dict[int, Any] = {}
        self._waiting: list[int] = []  # sorted: what comes back is older than what was never leased
        self._leases: dict[str, Lease] = {}
        self._finished: dict[int, Finished] = {}
        self._partials: dict[int, Partial] = {}
        self._members = Members()

    @property
    def waiting(self) -> list[int]:
        """The ids of the prompts that wait, the oldest first; they are leased in this order."""
        return list(self._waiting)

    @property
    def leases(self) -> list[Lease]:
        return list(self._leases.values())

    def find(self, lease_id: str) -> Lease | None:
        """Return a lease; None for one that was taken away or has ended."""
        return self._leases.get(lease_id)

    @property
    def finished(self) -> list[Finished]:
        return list(self._finished.values())

    @property
    def workers(self) -> dict[int, Worker]:
        """The living workers by their number."""
        return self._members.living

    @property
    def prompts(self) -> dict[int, Any]:
        """The prompts that are neither trained on nor dropped; a checkpoint needs them."""
        return dict(self._prompts)

    @property
    def partials(self) -> dict[int, Partial]:
        """What workers reported of prompts that wait or are leased; a checkpoint may keep it."""
        return dict(self._partials)

    # Workers

    def join(self, worker: int, incarnation: int, now: float) -> bool:
        """Admit a worker and return True; False where a newer incarnation has joined already.

        A new incarnation loses the leases of the old one.
        """
        if self._members.is_outdated(worker, incarnation):
            return False
        if not self._members.has(worker, incarnation):
            self.lose(worker)
        self._members.add(worker, incarnation, now)
        return True

    def heartbeat(self, worker: int, incarnation: int, now: float) -> bool:
        """Note that a worker lives; False where it was lost or replaced and has to join again."""
        if not self._members.has(worker, incarnation):
            return False
        self._members.hear(worker, now)
        return True

    def lose(self, worker: int) -> list[Lease]:
        """Forget a worker that died or leaves; return its leases, whose prompts are the first to be
        leased again."""
        self._members.remove(worker)
        lost = [lease for lease in self._leases.values() if lease.worker == worker]
        self._take_back(lost)
        return lost

    def expire(self, now: float, limit_s: float) -> list[int]:
        """Lose the workers that were not heard of for more than limit_s; return their numbers."""
        late = self._members.late(now, limit_s)
        for worker in late:
            self.lose(worker)
        return late

    # Prompts and leases

    def add(self, prompts: Iterable[Any]) -> list[int]:
        """Enter prompts in the order of the cursor; return their ids."""
        ids = []
        for prompt in prompts:
            self._prompts[self._next_item] = prompt
            ids.append(self._next_item)
            self._next_item += 1
        self._waiting += ids
        return ids

    def num_to_draw(self, version: int, most: int) -> int:
        """Return how many prompts to add before `lease` can give `most` to an engine of `version`."""
        return max(0, min(most, self.capacity(version)) - len(self._waiting))

    def capacity(self, version: int) -> int:
        """Return how many groups an engine of `version` may start; 0 where it has to wait."""
        return max(0, min(self._max_in_flight - len(self._leases), self._room(version)))

    def lease(self, worker: int, version: int, most: int) -> list[Lease]:
        """Lease up to `most` prompts to a worker whose engine has `version`, the oldest prompts first.

        An empty list means: wait, for newer weights where `version` is old, or for other groups.
        Partial rollouts that are too old to be continued are discarded. Raises ValueError where the
        worker has not joined or the trainer has no such version.
        """
        self._check_worker(worker, version)
        free = self.capacity(version)
        granted: list[Lease] = []
        while self._waiting and len(granted) < min(most, free):
            item_id = self._waiting.pop(0)
            partial = self._partials.get(item_id)
            if partial and self._room(min(version, partial.oldest)) < 1:
                self._discard_partial(item_id)
                partial = None
            granted.append(self._grant(item_id, worker, version, partial))
        return granted

    def report(self, lease_id: str, partial: Partial) -> bool:
        """Keep the tokens so far of a leased prompt in case its worker is lost; False for a lease that
        was taken away. Raises ValueError where the version cannot be."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.check_versions(partial.oldest, self.step, self.step)
        self._partials[lease.item_id] = partial
        return True

    def give_back(self, lease_id: str) -> bool:
        """Let others generate what its worker cannot; False for a lease that was taken away."""
        lease = self._leases.get(lease_id)
        self._take_back([lease] if lease else [])
        return lease is not None

    def finish(
        self, lease_id: str, group: Any, *, oldest: int, newest: int, num_tokens: int
    ) -> bool:
        """Put a finished group into the queue; False where it was not kept.

        `oldest` and `newest` are the versions that sampled its tokens. A group whose lease was taken
        away or has ended is a duplicate: it is dropped and counted. One beyond the bound is generated
        anew (`wait`) or dropped and counted (`drop`). Raises ValueError where the versions cannot be.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            self.tally.duplicates += 1
            self.tally.discarded_tokens += num_tokens
            return False
        lease.check_versions(oldest, newest, self.step)
        del self._leases[lease_id]
        self._partials.pop(lease.item_id, None)
        self._finished[lease.item_id] = Finished(
            lease.item_id, lease.prompt, group, oldest, newest, num_tokens
        )
        self._remove_too_old()
        return lease.item_id in self._finished

    def drop(self, lease_id: str, cause: str, num_tokens: int = 0) -> bool:
        """Drop a leased prompt for good and count it under `cause`; another prompt takes its place.

        Returns False for a lease that was taken away.
        """
        lease = self._leases.pop(lease_id, None)
        self.tally.discarded_tokens += num_tokens
        if lease is None:
            self.tally.duplicates += 1
            return False
        self._partials.pop(lease.item_id, None)
        self._forget(lease.item_id, cause)
        return True

    # Batches

    def take(self, version: int) -> list[Finished] | None:
        """Return the B groups that step `version` trains on, in the order of their prompts; None where
        the trainer has to wait. Raises ValueError where `version` is not the next step."""
        if version != self.step:
            raise ValueError(f"got step {version}, expected {self.step}, the next one")
        batch = self._batch()
        if batch is None:
            return None
        for group in batch:
            del self._finished[group.item_id], self._prompts[group.item_id]
        self.tally.staleness = Counter(version - group.oldest for group in batch)
        self.tally.trained += len(batch)
        self.step += 1
        self._remove_too_old()
        return sorted(batch, key=lambda group: group.item_id)

    def _batch(self) -> list[Finished] | None:
        leased = [lease.oldest for lease in self._leases.values()]
        if self._at_bound == "wait" and self._bound.makes_late(self.step, leased):
            return None
        size = self._bound.prompts_per_step
        ready = sorted(self._finished.values(), key=lambda group: (group.oldest, group.item_id))
        return ready[:size] if len(ready) >= size else None

    def _room(self, oldest: int) -> int:
        in_flight = [*self._leases.values(), *self._finished.values()]
        return self._bound.room(self.step, [each.oldest for each in in_flight], oldest)

    # Moves from place to place

    def _grant(
        self, item_id: int, worker: int, version: int, partial: Partial | None = None
    ) -> Lease:
        lease_id = f"{self._session}:{self._next_lease}"
        self._next_lease += 1
        self.tally.kept_tokens += partial.num_tokens if partial else 0
        lease = Lease(lease_id, item_id, self._prompts[item_id], worker, version, partial)
        self._leases[lease_id] = lease
        return lease

    def _take_back(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            del self._leases[lease.lease_id]
            bisect.insort(self._waiting, lease.item_id)

    def _discard_partial(self, item_id: int) -> None:
        self.tally.discarded_tokens += self._partials.pop(item_id).num_tokens

    def _discard_group(self, item_id: int) -> None:
        """Let the prompt of a finished group be generated anew."""
        self.tally.discarded_tokens += self._finished.pop(item_id).num_tokens
        bisect.insort(self._waiting, item_id)

    def _remove_too_old(self) -> None:
        for group in self.finished:
            if self._bound.due(group.oldest) < self.step:
                self._discard_group(group.item_id)
                if self._at_bound == "drop":
                    self._waiting.remove(group.item_id)
                    self._forget(group.item_id, TOO_OLD)

    def _forget(self, item_id: int, cause: str) -> None:
        del self._prompts[item_id]
        self.tally.dropped[cause] += 1

    def _check_worker(self, worker: int, version: int) -> None:
        if worker not in self._members:
            raise ValueError(f"worker {worker} has not joined, or was lost; it has to join first")
        if not 0 <= version <= self.step:
            raise ValueError(
                f"worker {worker} asks with weights {version}, expected 0 to {self.step}: the trainer "
                "has no others"
            )

    # Checkpoints and metrics

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-able state without payloads. Leased prompts are among those that wait.

        `load_state_dict` needs `prompts`, the groups of `finished`, and may have `partials`.
        """
        leased = [lease.item_id for lease in self._leases.values()]
        return {
            "step": self.step,
            "tally": self.tally.state_dict(),
            "next_item": self._next_item,
            "next_lease": self._next_lease,
            "waiting": sorted([*self._waiting, *leased]),
            "finished": [group.outline() for group in self._finished.values()],
        }

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        prompts: Mapping[int, Any],
        groups: Mapping[int, Any],
        partials: Mapping[int, Partial] | None = None,
    ) -> None:
        """Continue from what `state_dict` returned, with payloads by id; workers stay, without leases.

        A finished group that `groups` lacks is generated anew, and so is one that a smaller bound of
        today's recipe forbids (`at_bound: drop` drops and counts it). Raises ValueError where `prompts`
        lacks one.
        """
        alive = sorted([*state["waiting"], *(each["id"] for each in state["finished"])])
        missing = [item_id for item_id in alive if item_id not in prompts]
        if missing:
            raise ValueError(f"the checkpoint lacks the prompts {missing} of its ledger")
        self.step, self.tally = state["step"], Tally.restore(state["tally"])
        self._next_item = state["next_item"]
        self._next_lease = max(self._next_lease, state["next_lease"])
        self._prompts = {item_id: prompts[item_id] for item_id in alive}
        self._waiting = sorted(state["waiting"])
        self._finished = {
            each["id"]: Finished.restore(each, prompts, groups) for each in state["finished"]
        }
        self._leases = {}
        kept = partials or {}
        self._partials = {i: kept[i] for i in self._waiting if i in kept}
        for item_id in [each for each in self._finished if each not in groups]:
            self._discard_group(item_id)
        self._remove_too_old()

    def metrics(self) -> dict[str, float]:
        """Return `async/*`: what is in each place now, and what was lost since the run began."""
        oldest = min((group.oldest for group in self._finished.values()), default=self.step)
        places = {
            "async/waiting_prompts": len(self._waiting),
            "async/leased_groups": len(self._leases),
            "async/queued_groups": len(self._finished),
            "async/queue_age": self.step - oldest,
        }
        counts = self.tally.metrics(self._bound.max_staleness)
        return {key: float(count) for key, count in places.items()} | counts
