"""A service of 20 tenants on a simulated clock, and what must hold of `mrl.service.schedule` in it.

Every check takes the module as an argument, so that test_schedule.py can run it on planted bugs.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

SLACK = 1e-6
LONG_S = 1e9


@dataclass
class Wait:
    """One wait in line, with the bound that the docstring of TrainingQueue promises for it."""

    tenant: str
    since: float
    bound_s: float
    seconds: float = 0.0


@dataclass
class Service:
    """Trains tenants that roll out, get in line and are trained, forever; its clock is simulated.

    It keeps its own account of what is expected, from which the bounds of `waits` are computed.
    """

    schedule: ModuleType
    seed: int
    max_wait_s: float
    costs_s: dict[str, float]
    weights: dict[str, float] = field(default_factory=dict)
    rollout_s: float = 0.0
    """The mean time from the end of an update to the next samples."""
    varies: float = 0.0
    """The share by which an update may be longer or shorter."""
    disturbed: bool = False
    """Whether tenants are paused, resumed, removed and added now and then."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queue = self.schedule.TrainingQueue(self.max_wait_s)
        self.now, self.count = 0.0, itertools.count()
        self.expected: dict[str, float] = {}
        self.line: dict[str, tuple[float, Wait]] = {}
        self.rolling: list[tuple[float, int, str]] = []
        self.paused: dict[str, float] = {}
        self.busy_until = 0.0
        self.waits: list[Wait] = []
        self.trained: list[tuple[float, str, float]] = []
        for tenant in self.costs_s:
            self.join(tenant)

    def join(self, tenant: str) -> None:
        self.queue.join(tenant, self.weights.get(tenant, 1.0))
        self.roll_out(tenant)

    def roll_out(self, tenant: str) -> None:
        seconds = self.random.expovariate(1 / self.rollout_s) if self.rollout_s else 0.0
        heapq.heappush(self.rolling, (self.now + seconds, next(self.count), tenant))

    def ready(self, tenant: str, when: float) -> None:
        self.queue.ready(tenant, when)
        if tenant in self.line or tenant in self.paused:
            return
        ahead = sum(cost for cost, _ in self.line.values()) + max(0.0, self.busy_until - when)
        cost = self.expected.get(tenant, max(self.expected.values(), default=0.0))
        self.line[tenant] = cost, Wait(tenant, when, max(self.max_wait_s, ahead))

    def disturb(self) -> None:
        """Pause, resume or replace one tenant; nothing that is kept of the others changes."""
        tenant = self.random.choice(list(self.costs_s))
        before = others(self.queue, tenant)
        if tenant in self.paused:
            del self.paused[tenant]
            self.join(tenant)
        else:
            self.queue.leave(tenant)
            self.line.pop(tenant, None)
            self.expected.pop(tenant, None)  # new tenants' costs are guessed from those still here
            self.rolling = [entry for entry in self.rolling if entry[2] != tenant]
            heapq.heapify(self.rolling)
            if self.random.random() < 0.5:
                self.paused[tenant] = self.now
            else:
                self.join(tenant)
        assert others(self.queue, tenant) == before, f"{tenant} disturbed the others"

    def run(self, num_updates: int) -> Service:
        while len(self.trained) < num_updates:
            self.arrive(self.now)
            if self.disturbed and self.random.random() < 0.3:
                self.disturb()
            tenant = self.queue.take(self.now)
            assert (tenant is None) == (not self.line), "the trainer idles while tenants wait"
            if tenant is None:
                assert self.rolling or self.paused
                self.now = self.rolling[0][0] if self.rolling else self.now + 1
                continue
            self.train(tenant)
        return self

    def arrive(self, until: float) -> None:
        while self.rolling and self.rolling[0][0] <= until:
            when, _, tenant = heapq.heappop(self.rolling)
            self.ready(tenant, max(when, self.now))

    def train(self, tenant: str) -> None:
        cost, wait = self.line.pop(tenant)
        wait.seconds = self.now - wait.since
        self.waits.append(wait)
        vary = 1 + self.varies * self.random.uniform(-1, 1)
        took = self.costs_s[tenant] * vary
        start, self.busy_until = self.now, self.now + cost
        while self.rolling and self.rolling[0][0] <= start + took:
            when, _, other = heapq.heappop(self.rolling)
            self.ready(other, max(when, start))
            if self.random.random() < 0.2:
                self.ready(other, start + took)  # polled again: no news
        for _, waiting in self.line.values():
            waiting.bound_s += max(0.0, took - cost)
        self.now = self.busy_until = start + took
        self.queue.done(took)
        self.expected[tenant] = max(took, 0.9 * self.expected.get(tenant, 0.0))
        self.trained.append((start, tenant, took))
        self.roll_out(tenant)

    def longest_wait_s(self) -> float:
        waiting = [self.now - wait.since for _, wait in self.line.values()]
        return max([wait.seconds for wait in self.waits] + waiting)


def others(queue: Any, tenant: str) -> list[dict[str, Any]]:
    return [asdict(entry) for name, entry in queue._entries.items() if name != tenant]


def random_costs(seed: int, num: int = 20) -> dict[str, float]:
    """Sizes that differ by a factor of up to 400."""
    source = random.Random(seed)
    return {f"t{n}": 10 ** source.uniform(-0.9, 1.7) for n in range(num)}


def random_weights(seed: int, names: dict[str, float]) -> dict[str, float]:
    source = random.Random(seed + 1)
    return {name: source.choice([0.5, 1.0, 1.0, 3.0, 10.0]) for name in names}


def check_wait(schedule: ModuleType, seed: int) -> None:
    """Must-show: of 20 tenants of random sizes nobody waits longer than max_wait_s and one update."""
    costs = random_costs(seed)
    wait_s, longest = sum(costs.values()), max(costs.values())
    for rollout_s in (0.0, wait_s / 40, wait_s):
        service = Service(schedule, seed, wait_s, costs, random_weights(seed, costs), rollout_s)
        service.run(120)
        assert service.longest_wait_s() <= wait_s + longest + SLACK
        late = [w for w in service.waits if w.since > 2 * wait_s and w.seconds > wait_s + SLACK]
        assert not late, "all costs are known by now, so max_wait_s itself holds"


def check_bound(schedule: ModuleType, seed: int) -> None:
    """Inequality (1) holds for every wait, under any load, with surprises and pauses."""
    source = random.Random(seed)
    costs = random_costs(seed)
    service = Service(
        schedule, seed, sum(costs.values()) * source.choice([0.01, 0.3, 0.7, 2.0]), costs,
        random_weights(seed, costs), source.choice([0.0, 3.0, 100.0, 600.0]),
        source.choice([0.0, 0.1, 0.9]), source.random() < 0.5,
    ).run(120)  # fmt: skip
    late = [wait for wait in service.waits if wait.seconds > wait.bound_s + SLACK]
    assert not late, late[:3]


def check_weights(schedule: ModuleType, seed: int) -> None:
    """Tenants that are always in line get seconds by their weights, to within one update, always."""
    costs = random_costs(seed, num=6)
    weights = random_weights(seed, costs)
    service = Service(schedule, seed, LONG_S, costs, weights, varies=0.3).run(400)
    given = dict.fromkeys(costs, 0.0)
    for _, tenant, took in service.trained:
        given[tenant] += took
        paid = {name: given[name] / weights[name] for name in costs}
        one = max(1.3 * costs[name] / weights[name] for name in costs)
        assert max(paid.values()) - min(paid.values()) <= one + SLACK


def check_away(schedule: ModuleType, seed: int) -> None:
    """A tenant that was away or paused comes back as an equal: nothing saved up, and no old debt."""
    queue = schedule.TrainingQueue(LONG_S)
    for tenant in "abc":
        queue.join(tenant)
    queue.ready("a", 0.0)
    assert queue.take(0.0) == "a"
    queue.done(50.0)
    now = 50.0
    if seed % 2:
        queue.leave("a")
    for tenant in "bc" * 60:  # a is away; both others are always in line
        queue.ready("b", now)
        queue.ready("c", now)
        assert queue.take(now) == tenant
        now += 1.0
        queue.done(1.0)
    if seed % 2:
        queue.join("a")
    order = ""
    for _ in range(9):
        for tenant in "abc":
            queue.ready(tenant, now)
        order += queue.take(now) or "-"
        now += 1.0
        queue.done(1.0)
    assert order[0] == "a", order  # its 50 s were paid while the others were trained for 60 s each
    assert all(order.count(tenant) in (2, 3, 4) for tenant in "abc"), order


def check_order(schedule: ModuleType, seed: int) -> None:
    """Equals go in the order in which they joined; who comes again, at the end of those that wait."""
    names = random.Random(seed).sample("abcdefgh", 8)
    queue = schedule.TrainingQueue(1e-6)
    for tenant in names:
        queue.join(tenant)
    for tenant in reversed(names):
        queue.ready(tenant, 0.0)
    assert list(queue.ages_s(0.0)) == names[::-1], "in the order of their calls of ready()"
    taken = []
    for _ in names:
        taken.append(queue.take(0.0))
        queue.done(2.0)
    assert taken == names
    for number, tenant in enumerate(names):
        queue.ready(tenant, 10.0 + number)
    queue.leave(names[0])
    queue.join(names[0])
    queue.ready(names[0], 50.0)
    assert list(queue.ages_s(100.0)) == [*names[1:], names[0]]
    assert queue.ages_s(100.0)[names[0]] == 50.0
    queue.leave(names[1])
    assert queue.take(100.0) == names[2], "all are at their bound: the first that came"


def check_rest(schedule: ModuleType, seed: int) -> None:
    """A promise counts the rest of the update under way; where that ends early, others may overtake."""
    queue = schedule.TrainingQueue(1e-6)
    for tenant, seconds in (("a", 10.0), ("b", 3.0), ("c", 3.0)):
        queue.join(tenant)
        queue.ready(tenant, 0.0)
        assert queue.take(0.0) == tenant
        queue.done(seconds)
    queue.ready("a", 16.0)
    assert queue.take(16.0) == "a"
    queue.ready("c", 17.0)
    queue.ready("b", 17.0)
    queue.done(2.0)
    assert queue.take(18.0) == "b", "it joined before c, which is promised a start by 26"


QUEUE_CHECKS = [
    check_order, check_rest, check_away, check_weights, check_wait, check_bound,
]  # fmt: skip
