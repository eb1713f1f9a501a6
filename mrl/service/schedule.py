"""The scheduling policy of a service with many tenants.

TrainingQueue   chooses the tenant that is trained next, among the tenants with complete samples
Admission       chooses the waiting requests that go to an engine now, given its free KV memory
Phase           chooses the tenants that roll out together if trainer and engine share the GPUs

All of it is deterministic and reads no clock: `now` is in seconds on any clock that does not go
back. After a restart of the service, the debts of all tenants (see `TrainingQueue`) are zero again,
and the seconds that their updates take are measured again.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrl.engines.admission import Demand

ROUNDING_S = 1e-9
FORGETS = 0.9
"""An update that is shorter than expected lowers the tenant's expected cost, but never below this
fraction of the former expected cost."""


@dataclass
class _Entry:
    """The queue's state for one tenant. Times are in seconds."""

    tenant: str
    number: int
    weight: float
    debt_s: float = 0.0
    expected_s: float | None = None
    """The expected cost of the tenant's next update; None before the first update."""
    has_samples: bool = False
    """Whether the tenant is in line or being trained."""
    place: int = 0
    """The sort key of the line: smaller for tenants that got in line earlier."""
    since: float = 0.0
    """When the tenant got in line."""
    latest: float = 0.0
    """The time by which the tenant's update is promised to start."""
    cost_s: float = 0.0
    """The expected cost of the tenant's update at the time when the tenant got in line."""


class TrainingQueue:
    """Chooses whose samples are trained next: deficit round-robin, with a bound on the wait.

    **Debts.** A tenant's debt is the number of seconds that its updates took, minus the seconds
    that it was forgiven. The seconds of an update include the swap, which brings the tenant's state
    to the device. The tenant in line with the smallest debt per weight is next; among equals, the
    one that joined first. If all tenants in line have debts, every tenant is first forgiven its
    weight times the smallest debt per weight among the tenants in line. (This is deficit
    round-robin that charges once the cost is known, with the smallest quantum that lets one tenant
    run.) No debt falls below zero, so no tenant saves up time while away.

    **The bound.** A tenant i that gets in line at time r is promised a start by D = r + max(max_wait_s,
    B). B would be the wait of i if all tenants were served in the order in which they came: the rest
    of the update under way, and the updates in line. Tenant k may overtake others only if, for every
    tenant i that it overtakes, now + cost of k + costs of the tenants in line before i <= D of i. Then

        wait of i  <=  max(max_wait_s, B) + E                                                       (1)

    E is a sum over the updates that ran while i waited: for each update, the seconds by which it
    took longer than its expected cost. The expected cost of an update is the larger of two numbers:
    the cost of the tenant's last update, and FORGETS times the expected cost of that last update.
    For a tenant's first update, the expected cost is the largest expected cost of all tenants in
    the queue at that time.

    docs/tenants.md ("Who is trained next") proves the bound (1), and says for which load it helps.
    """

    def __init__(self, max_wait_s: float) -> None:
        """`max_wait_s`: the longest wait in seconds that is promised, if the load allows it. Raises
        ValueError if `max_wait_s` is not a finite number > 0."""
        self.max_wait_s = _positive("max_wait_s", max_wait_s)
        self.running: str | None = None
        """The tenant whose update is under way."""
        self._started = 0.0
        self._entries: dict[str, _Entry] = {}
        self._count = 0

    def ages_s(self, now: float) -> dict[str, float]:
        """Return how many seconds each tenant in line has waited, the longest wait first."""
        return {entry.tenant: now - entry.since for entry in self._line()}

    def join(self, tenant: str, weight: float = 1.0) -> None:
        """Add a tenant without debt. Raises ValueError if the weight is not a finite number > 0, or
        if the tenant is in the queue already."""
        if tenant in self._entries:
            raise ValueError(f"tenant {tenant} is in the queue already; leave it first")
        self._entries[tenant] = _Entry(tenant, self._count, _positive("weight", weight))
        self._count += 1

    def leave(self, tenant: str) -> None:
        """Remove a tenant. Raises RuntimeError if the tenant's update is under way. Raises KeyError
        for an unknown tenant, as `ready` does."""
        if tenant == self.running:
            raise RuntimeError(f"the update of {tenant} is under way; end it first")
        del self._entries[tenant]

    def ready(self, tenant: str, now: float) -> None:
        """Put a tenant, whose samples are complete, in line. Does nothing if the tenant is in line
        already or is being trained."""
        entry = self._entries[tenant]
        if not entry.has_samples:
            ahead = sum(other.cost_s for other in self._line())
            if self.running is not None:
                ahead += max(0.0, self._started + self._entries[self.running].cost_s - now)
            longest = max(each.expected_s or 0.0 for each in self._entries.values())
            entry.cost_s = longest if entry.expected_s is None else entry.expected_s
            entry.since, entry.latest = now, now + max(self.max_wait_s, ahead)
            entry.place = self._count = self._count + 1
        entry.has_samples = True

    def take(self, now: float) -> str | None:
        """Begin the next update. Return the tenant to train; None if no tenant is in line. Raises
        RuntimeError if an update is under way."""
        if self.running is not None:
            raise RuntimeError(f"the update of {self.running} is under way; end it first")
        line = self._line()
        if not line:
            return None
        forgiven = min(entry.debt_s / entry.weight for entry in line)
        for entry in self._entries.values():
            left = entry.debt_s - forgiven * entry.weight
            entry.debt_s = left if left > ROUNDING_S else 0.0
        by_debt = sorted(line, key=lambda entry: (entry.debt_s / entry.weight, entry.number))
        self.running = next(e.tenant for e in by_debt if _keeps_promises(e, line, now))
        self._started = now
        return self.running

    def done(self, seconds: float) -> None:
        """End the update under way, which took `seconds` > 0 including its swap. If the tenant
        already has samples for its next update, call ready() after this. Raises ValueError if
        `seconds` is not a finite number > 0, and RuntimeError if no update is under way."""
        seconds = _positive("seconds", seconds)
        if self.running is None:
            raise RuntimeError("no update is under way; call take() first")
        entry, self.running = self._entries[self.running], None
        entry.has_samples = False
        entry.debt_s += seconds
        entry.expected_s = max(seconds, FORGETS * (entry.expected_s or 0.0))

    def _line(self) -> list[_Entry]:
        """Return the tenants in line, in the order in which they came."""
        line = [e for e in self._entries.values() if e.has_samples]
        others = (entry for entry in line if entry.tenant != self.running)
        return sorted(others, key=lambda entry: entry.place)


def _keeps_promises(chosen: _Entry, line: Sequence[_Entry], now: float) -> bool:
    """Return whether every tenant that `chosen` would overtake can still start by its promised
    time."""
    start = now + chosen.cost_s
    for entry in line[: line.index(chosen)]:
        if start > entry.latest:
            return False
        start += entry.cost_s
    return True


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: got {value}, expected a finite number > 0")
    return value


class Admission:
    """Chooses which waiting requests go to an engine now, by weighted max-min shares of KV memory.

    Requests are admitted one at a time, always from the tenant with the fewest tokens in flight per
    weight. A tenant that has no more waiting requests, or is at its limit, drops out, and the others
    share the rest of the memory. If a request does not fit, smaller requests of other tenants may be
    admitted before it, until these add up to as many tokens as the engine can hold.

    **Over-commit.** Requests are admitted only while the expected tokens of all requests in flight
    fit. A request may become longer than expected, but by a factor of at most max_over_commit,
    because its expected length is at least its maximum length / max_over_commit. So the requests in
    flight never need more than max_over_commit times the capacity. If they need more than the
    capacity, the engine retracts some of them.
    """

    PRIOR = 8
    """The expected length of a tenant's requests is the mean length of the finished requests and of
    this many imaginary requests of the maximum length. Without them, the expected length would
    be too small at first, because short requests finish first."""
    WINDOW = 512

    def __init__(self, max_over_commit: float = 4.0) -> None:
        """`max_over_commit`: limit on the KV memory that the admitted requests take if all of them
        reach their maximum length, as a multiple of the engine's KV memory. A value below 1 counts
        as 1; with 1, every admitted request has room for its maximum length."""
        self.max_over_commit = max(1.0, _positive("max_over_commit", max_over_commit))
        self._lengths: dict[str, tuple[int, float]] = {}
        self._passed: dict[str, int] = {}

    def finished(self, tenant: str, num_tokens: int) -> None:
        """Record the number of tokens, prompt and answer together, of a request that has
        finished."""
        number, mean = self._lengths.get(tenant, (0, 0.0))
        number = min(number + 1, self.WINDOW)
        self._lengths[tenant] = number, mean + (num_tokens - mean) / number

    def leave(self, tenant: str) -> None:
        """Remove all that is stored about a tenant, such as the lengths of its requests."""
        self._lengths.pop(tenant, None)
        self._passed.pop(tenant, None)

    def tokens_each(self, tenant: str, max_tokens: int) -> int:
        """Return how many tokens a request of the tenant is expected to hold, at most `max_tokens`."""
        number, mean = self._lengths.get(tenant, (0, 0.0))
        expected = (self.PRIOR * max_tokens + number * mean) / (self.PRIOR + number)
        return min(max_tokens, math.ceil(max(expected, max_tokens / self.max_over_commit)))

    def admit(
        self, free_tokens: int, capacity_tokens: int, demands: Sequence[Demand]
    ) -> dict[str, int]:
        """Return how many waiting requests of each tenant go to the engine now.

        `free_tokens` is `capacity_tokens` minus the tokens of the requests in flight. If a request
        is larger than its tenant's limit or than the capacity, its size counts as the smaller of
        these two numbers.
        """
        waiting = {demand.tenant for demand in demands if demand.num_waiting}
        self._passed = {t: tokens for t, tokens in self._passed.items() if t in waiting}
        granted = {demand.tenant: 0 for demand in demands}
        turns = [(d.tokens_in_flight / d.weight, place) for place, d in enumerate(demands)]
        heapq.heapify(turns)
        too_large: list[str] = []
        while turns:
            _, place = heapq.heappop(turns)
            each = demands[place]
            cost = max(1, min(each.tokens_each, each.max_tokens_in_flight, capacity_tokens))
            held = each.tokens_in_flight + (granted[each.tenant] + 1) * cost
            if granted[each.tenant] == each.num_waiting or held > each.max_tokens_in_flight:
                continue
            if cost > free_tokens:
                too_large.append(each.tenant)
            else:
                granted[each.tenant] += 1
                free_tokens -= cost
                self._passed.pop(each.tenant, None)
                for tenant in too_large:
                    self._passed[tenant] = self._passed.get(tenant, 0) + cost
                heapq.heappush(turns, (held / each.weight, place))
            if any(self._passed.get(tenant, 0) >= capacity_tokens for tenant in too_large):
                break
        return granted


@dataclass(frozen=True)
class Phase:
    """Chooses which tenants take part in a rollout phase if trainer and engine share the GPUs.

    No tenant is passed over, so each of n waiting tenants takes part in one of the next n phases.
    """

    max_tenants: int
    """How many adapters the engine can hold at the same time."""
    fill: float = 4.0
    """Limit on the number of tokens in a phase's samples, as a multiple of the tokens that fit into
    the KV memory at once. A phase with only one tenant has no limit. More tokens would not use the
    engine better, and tenants would wait longer for each other."""

    def start(self, capacity_tokens: int, wanting: Mapping[str, int]) -> list[str]:
        """Return the tenants that take part: the first ones in `wanting`, as many as `max_tenants`
        and `fill` allow, but at least one.

        `wanting`: the tenants that need samples, in the order in which they began to need them. The
        value of a tenant is an upper bound on the total number of tokens in its samples of the
        phase.
        `capacity_tokens`: the number of tokens that fit into the KV memory at once.
        """
        ends = itertools.accumulate(wanting.values())
        room = self.fill * capacity_tokens
        fits = [tenant for tenant, end in zip(wanting, ends, strict=True) if end <= room]
        return fits[: self.max_tenants] or list(wanting)[:1]
