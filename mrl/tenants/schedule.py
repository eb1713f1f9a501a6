"""This module decides who is next: the whole scheduling policy of a service with many tenants.

TrainingQueue   which tenant that has its samples is trained next
Admission       which waiting requests go to an engine now, by what is left of its KV memory
Phase           which tenants roll out together where trainer and engine share the GPUs

All of it is deterministic and reads no clock: `now` is in seconds on any clock that does not go back.
Nothing is kept over a restart: nobody owes anything then, and each update tells its cost anew.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrl.rollout.gate import Demand

ROUNDING_S = 1e-9
FORGETS = 0.9
"""What is expected of a tenant's update falls by this factor with each update that is shorter."""


@dataclass
class _Entry:
    """Holds what the queue knows of a tenant; times in seconds."""

    tenant: str
    number: int
    weight: float
    debt_s: float = 0.0
    expected_s: float | None = None
    """What its next update is expected to take; None before the first."""
    has_samples: bool = False  # and is in line, unless its update is under way
    place: int = 0
    """Its place in line; then follow when it got there, its promised start and its expected cost."""
    since: float = 0.0
    latest: float = 0.0
    cost_s: float = 0.0


class TrainingQueue:
    """Chooses whose samples are trained next: deficit round-robin, with a bound on the wait.

    **Debts.** A tenant's debt is the seconds of swap and update that its share has not paid for yet.
    The tenant in line with the least debt per weight is next, among equals the one that joined first.
    If nobody in line is free of debt, everybody is first forgiven as much per weight as the least of
    them has. (This is deficit round-robin that charges when the cost is known, with the smallest
    quantum that lets one run.) No debt falls below zero: nobody saves up time while away.

    *Weights are kept within one update.* Let tenants be in line whenever they are not trained, X be the
    debt per weight forgiven so far, and S the seconds that tenant i was trained. Its debt S - weight X
    is never negative, as nobody in line is forgiven more than it owes, and at most one update of i, as
    i is chosen only without debt. So S / weight is within (an update of i) / weight of the same X for
    all.

    **The bound.** Whoever gets in line, say i at time r, is promised a start by D = r + max(max_wait_s,
    B). B is its wait if all were served as they came: the rest of the update under way, and the updates
    in line. Tenant k may overtake others only if now + cost of k + costs in line before i <= D for
    every i that it overtakes. Then

        wait of i  <=  max(max_wait_s, B) + E                                                       (1)

    E is how much longer than expected, in sum, the updates took that ran while i waited. Expected is
    what the tenant's last update took, or FORGETS times what was expected of it if that is more; at
    first, the most expected of any tenant.

    *Proof.* Let A(t) be the costs in line before i. While costs are as expected, t + A(t) <= D whenever
    the trainer is free: at first t + A(t) = r + B. If one before i is trained, t grows by what A loses.
    If one behind i is, the rule says that t + A(t) <= D holds after it. Others get in line behind i;
    who leaves shortens A. The first in line overtakes nobody, so one may always be trained. So i, which
    starts when A is 0, starts by D. An update that takes e longer adds e to t.

    *Under which load.* If the updates of all tenants together take at most max_wait_s, so does B:
    nobody waits longer than max_wait_s, or than max_wait_s plus the longest update if E is at most
    that. Under more load nobody could promise it: of tenants that get ready at once, the last waits for
    all others. They are then served about as they came, and the weights count for little.
    """

    def __init__(self, max_wait_s: float) -> None:
        """`max_wait_s`: the wait to keep to where the load allows, in seconds. Raises ValueError."""
        self.max_wait_s = _positive("max_wait_s", max_wait_s)
        self.running: str | None = None
        """The tenant whose update is under way."""
        self._started = 0.0
        self._entries: dict[str, _Entry] = {}
        self._count = 0

    def ages_s(self, now: float) -> dict[str, float]:
        """Return how long each tenant in line has waited, the longest first."""
        return {entry.tenant: now - entry.since for entry in self._line()}

    def join(self, tenant: str, weight: float = 1.0) -> None:
        """Add a tenant without debt. Raises ValueError for its weight, and if it is there already."""
        if tenant in self._entries:
            raise ValueError(f"tenant {tenant} is in the queue already; leave it first")
        self._entries[tenant] = _Entry(tenant, self._count, _positive("weight", weight))
        self._count += 1

    def leave(self, tenant: str) -> None:
        """Forget a tenant. Raises RuntimeError during its update, and KeyError, as all methods do."""
        if tenant == self.running:
            raise RuntimeError(f"the update of {tenant} is under way; end it first")
        del self._entries[tenant]

    def ready(self, tenant: str, now: float) -> None:
        """Put a tenant that has its samples in line; nothing changes for one that is in line."""
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
        """Return who is trained now, if anybody is in line. Raises RuntimeError during an update."""
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
        """End the update under way, which took `seconds` > 0 with its swap. Then call ready() again
        if the tenant has samples for another. Raises ValueError, RuntimeError."""
        seconds = _positive("seconds", seconds)
        if self.running is None:
            raise RuntimeError("no update is under way; call take() first")
        entry, self.running = self._entries[self.running], None
        entry.has_samples = False
        entry.debt_s += seconds
        entry.expected_s = max(seconds, FORGETS * (entry.expected_s or 0.0))

    def _line(self) -> list[_Entry]:
        """Return the tenants in line, first come first."""
        line = [e for e in self._entries.values() if e.has_samples]
        others = (entry for entry in line if entry.tenant != self.running)
        return sorted(others, key=lambda entry: entry.place)


def _keeps_promises(chosen: _Entry, line: Sequence[_Entry], now: float) -> bool:
    """Whether all that `chosen` overtakes start in time if it is trained now."""
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
    """Chooses which waiting requests go to an engine now: weighted max-min shares of its KV memory.

    One request after the other is given to the tenant whose tokens in flight are fewest for its weight.
    A tenant that wants no more, or is at its limit, drops out, and the others get what is left: its
    long tail is filled with their prompts. A request that does not fit lets smaller ones of others pass
    until as many tokens as the engine holds have passed it.

    **Over-commit.** Requests are admitted only while what is expected of all in flight fits. They may
    come to hold more, but of no request less is expected than its longest length / max_over_commit. So
    all in flight never hold more than max_over_commit times the capacity; the engine retracts some.
    """

    PRIOR = 8
    """So many requests of the longest length count as finished at first: short ones finish early."""
    WINDOW = 512

    def __init__(self, max_over_commit: float = 4.0) -> None:
        """`max_over_commit` is at least 1: each request then has room for its longest length."""
        self.max_over_commit = max(1.0, _positive("max_over_commit", max_over_commit))
        self._lengths: dict[str, tuple[int, float]] = {}
        self._passed: dict[str, int] = {}

    def finished(self, tenant: str, num_tokens: int) -> None:
        """Note the tokens, prompt and answer, of a request that finished."""
        number, mean = self._lengths.get(tenant, (0, 0.0))
        number = min(number + 1, self.WINDOW)
        self._lengths[tenant] = number, mean + (num_tokens - mean) / number

    def leave(self, tenant: str) -> None:
        """Forget a tenant."""
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
        """Return how many waiting requests of each tenant go to the engine now; `free_tokens` is
        `capacity_tokens` less what is in flight. A request larger than a limit counts as that."""
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
    """Chooses who takes part in a rollout phase where trainer and engine share the GPUs.

    `wanting`: the tenants that want samples, in the order in which they began to, each with the tokens
    that its whole round is expected to hold. Nobody is passed over, so of n tenants each takes part in
    one of the next n phases. Who is paused or leaves is no member any more.
    """

    max_tenants: int
    """Tenants whose adapters the engine holds at once."""
    fill: float = 4.0
    """A phase starts with at most `fill` times the KV memory: with more, the engine is no fuller, and
    those who have their samples wait for the others."""

    def start(self, capacity_tokens: int, wanting: Mapping[str, int]) -> list[str]:
        """Return who takes part: those that fit, the first of them in any case."""
        ends = itertools.accumulate(wanting.values())
        room = self.fill * capacity_tokens
        fits = [tenant for tenant, end in zip(wanting, ends, strict=True) if end <= room]
        return fits[: self.max_tenants] or list(wanting)[:1]
