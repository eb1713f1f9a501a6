"""Limits and counts staleness: how many groups may be in flight, and when a step has to wait.

Legend: B = `prompts_per_step`; n = `max_staleness`; s = the next step that has no batch yet. A
group is *in flight* while it is leased or finished. It is *due* in step `oldest + n`, where
`oldest` is the version of its oldest token. No later step may train on the group.

The rule is AReaL's (areal/infra/staleness_manager.py, `get_capacity`), except that it uses the
version of the engine instead of the trainer's version. An engine with weights of version `version`
may start groups as long as the steps up to `version + n` have room for them beside the groups in
flight that are due in these steps. So for every step d

    number of groups in flight that are due in step d or before <= (d - s + 1) * B    (1)

For d = s + n, this is AReaL's inequality: accepted + running <= (n + s + 1) * B. There, running is
the number of leased groups, and accepted = s * B + the number of finished groups. Each step takes
the groups that are due first. With `at_bound: wait`, a step waits as long as the steps after it
could not train on all leased groups before these become too old. docs/async.md proves that then no
finished group is ever too old, and that there is no deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mrl.types import SampleGroup


@dataclass(frozen=True)
class Bound:
    """The staleness rule: inequality (1) of the module's docstring with B = `prompts_per_step` and
    n = `max_staleness`."""

    prompts_per_step: int
    max_staleness: int

    def due(self, oldest: int) -> int:
        """Return the last step that may train on a group whose oldest token is of version
        `oldest`."""
        return oldest + self.max_staleness

    def room(self, step: int, in_flight: Iterable[int], oldest: int) -> int:
        """Return how many more groups the rule allows to be started if the oldest token of each is
        of version `oldest`.

        `step` is the next step that has no batch yet. `in_flight` has the version of the oldest
        token of each group that is leased or finished. The result is 0 if groups of version
        `oldest` would be too old for `step`. It is also 0 if the groups in flight break the rule,
        because the recipe has changed.
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
        """Return whether a leased group may become too old if `step` does not wait for it.

        `leased` has the version of the oldest token of each leased group. Finished groups need not
        be counted, because each step takes the finished groups that are due first.
        """
        dues = sorted(self.due(each) for each in leased)
        return any(
            count > (due - step) * self.prompts_per_step for count, due in enumerate(dues, start=1)
        )


def versions_of(group: SampleGroup) -> set[int]:
    """Return the versions of the weights that sampled tokens of a group."""
    return {span.version for sample in group.samples for span in sample.weight_versions}


def oldest_versions(groups: Iterable[SampleGroup]) -> list[int]:
    """Return the version of the oldest token of each group that has generated tokens."""
    return [min(versions) for versions in map(versions_of, groups) if versions]


def count_by_staleness(
    groups: Iterable[SampleGroup], step: int, max_staleness: int
) -> dict[str, float]:
    """Return metrics `async/staleness/AGE`: how many groups of `step` have an oldest token that is
    AGE versions old."""
    counts = Counter(dict.fromkeys(range(max_staleness + 1), 0))
    counts.update(step - version for version in oldest_versions(groups))
    return {f"async/staleness/{age}": float(count) for age, count in counts.items()}


def in_flight(
    newest: int, engines: Iterable[int | None], queue: Collection[int], num_leased: int
) -> dict[str, float]:
    """Return metrics `async/*`: the numbers of leased and of finished groups, the age of the
    oldest token in finished groups, the number of versions in use, and how many versions the
    slowest engine is behind.

    `newest` is the version of the trainer's weights. `engines` has the version of each engine, or
    None for an engine without weights. `queue` has the version of the oldest token of each finished
    group. `num_leased` is the number of groups that are being generated.
    """
    loaded = {version for version in engines if version is not None}
    counts = {
        "async/leased_groups": num_leased,
        "async/queued_groups": len(queue),
        "async/queue_age": newest + 1 - min(queue, default=newest + 1),
        "async/versions_in_flight": len(loaded.union(queue)),
        "async/engine_lag": newest - min(loaded, default=newest),
    }
    return {key: float(count) for key, count in counts.items()}
