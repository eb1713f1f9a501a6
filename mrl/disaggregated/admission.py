"""This module bounds the staleness: how many groups may be in flight, and when a step has to wait.

Legend: B = `prompts_per_step`; n = `max_staleness`; s = the next step that has no batch yet. A group is
*in flight* while it is leased or finished. It is *due* in step `oldest + n`, where `oldest` is the
version of its oldest token: a later step may not train on it.

Admission is AReaL's rule (areal/infra/staleness_manager.py, `get_capacity`), with the version of the
engine that asks in place of the trainer's: what an old engine may start is what the steps up to
`version + n` still have room for, beside what is in flight and due by then. For every step d this keeps

    number in flight that is due in step d or before  <=  (d - s + 1) * B                          (1)

and d = s + n is AReaL's inequality: accepted + running <= (n + s + 1) * B, accepted = s * B + queue.
By (1) the steps can train on every group in time if each takes the groups that are due first (Hall's
theorem). A step waits (`at_bound: wait`) while it could only leave so many groups for later that (1)
would fail for s + 1 and a leased one might be late. So no finished group is ever too old, however long
it takes. Nor can a deadlock arise: where nothing is leased, the B groups that are due first keep (1)
for s + 1; and where fewer than B are in flight, an engine with the newest version has capacity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """Holds what the rule depends on beside the step."""

    prompts_per_step: int
    max_staleness: int

    def due(self, oldest: int) -> int:
        """Return the last step that may train on a group whose oldest token is of version `oldest`."""
        return oldest + self.max_staleness

    def room(self, step: int, in_flight: Iterable[int], oldest: int) -> int:
        """Return how many more groups with tokens from version `oldest` on keep inequality (1).

        `in_flight` are the oldest versions of the groups in flight. Nothing is left for a version that
        is too old for `step`; then the result is 0, as it is where a changed recipe broke (1).
        """
        first, last = min(self.due(oldest), self.due(step)), self.due(step)
        if first < step:
            return 0
        counts = Counter(max(first, self.due(each)) for each in in_flight)
        total, rooms = 0, []
        for each in range(first, last + 1):
            total += counts[each]
            rooms.append((each - step + 1) * self.prompts_per_step - total)
        return max(0, min(rooms))

    def makes_late(self, step: int, leased: Sequence[int], rest: Iterable[int]) -> bool:
        """Whether a leased group may be late if `step` leaves the finished groups `rest` for later.

        `leased` and `rest` are oldest versions. Finished groups that are late already, because a recipe
        was changed, are no reason to wait.
        """
        if not leased:
            return False
        counts = Counter(self.due(each) for each in [*leased, *rest])
        return any(
            sum(count for due, count in counts.items() if due <= last)
            > (last - step) * self.prompts_per_step
            for last in range(self.due(min(leased)), self.due(step) + 1)
        )
