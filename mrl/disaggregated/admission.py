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
theorem). A step waits (`at_bound: wait`) while more groups are leased than the steps after it could
train on in time. So no finished group is ever too old, however long it takes. Nor can a deadlock arise:
where nothing is leased no step waits, and where fewer than B groups are in flight an engine with the
newest version has capacity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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

    def makes_late(self, step: int, leased: Iterable[int]) -> bool:
        """Whether a leased group may be late if `step` trains on finished groups only.

        `leased` are oldest versions. Finished groups need no look: `step` takes those that are due
        first, so where it leaves one for later its whole batch was due as early.
        """
        dues = sorted(self.due(each) for each in leased)
        return any(
            count > (due - step) * self.prompts_per_step for count, due in enumerate(dues, start=1)
        )
