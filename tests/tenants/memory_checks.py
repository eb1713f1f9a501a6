"""What must hold of `Admission` and `Phase` in `mrl.service.schedule`; schedule_checks.py says how."""

from __future__ import annotations

import itertools
import random
from types import ModuleType
from typing import Any

import pytest

CAPACITY = 10_000


def cost_of(demand: Any) -> int:
    return min(demand.tokens_each, demand.max_tokens_in_flight, CAPACITY)


def random_demands(
    schedule: ModuleType, source: random.Random, tokens_each: int | None = None
) -> tuple[int, list[Any]]:
    """Return (free tokens, demands) of up to 8 tenants that hold up to the whole capacity."""
    free, demands = CAPACITY, []
    for number in range(source.randint(1, 8)):
        held = source.choice([0, source.randint(0, free)])
        free -= held
        limit = source.choice([CAPACITY * 9, source.randint(1, CAPACITY)])
        each = tokens_each or source.choice(
            [source.randint(1, 500), source.randint(1, 2 * CAPACITY)]
        )
        weight, num = source.choice([0.5, 1.0, 4.0]), source.choice([0, 3, 10_000])
        demands.append(
            schedule.Demand(f"t{number}", weight, num, each, held, max(limit, held if held else 1))
        )
    return free, demands


def check_fits(schedule: ModuleType, seed: int) -> None:
    """Nothing is lent twice: what is admitted fits, is within the limits, and was waiting."""
    free, demands = random_demands(schedule, random.Random(seed))
    admitted = schedule.Admission().admit(free, CAPACITY, demands)
    assert set(admitted) == {demand.tenant for demand in demands}
    assert sum(cost_of(each) * admitted[each.tenant] for each in demands) <= free
    for each in demands:
        held = each.tokens_in_flight + cost_of(each) * admitted[each.tenant]
        assert 0 <= admitted[each.tenant] <= each.num_waiting
        assert held <= max(each.max_tokens_in_flight, each.tokens_in_flight)


def check_all_is_used(schedule: ModuleType, seed: int) -> None:
    """Work is conserved: a request waits only if it does not fit, or its tenant is at its limit."""
    free, demands = random_demands(schedule, random.Random(seed))
    admitted = schedule.Admission().admit(free, CAPACITY, demands)
    left = free - sum(cost_of(each) * admitted[each.tenant] for each in demands)
    for each in demands:
        held = each.tokens_in_flight + cost_of(each) * (admitted[each.tenant] + 1)
        waits = admitted[each.tenant] < each.num_waiting
        assert not waits or held > each.max_tokens_in_flight or cost_of(each) > left


def check_shares(schedule: ModuleType, seed: int) -> None:
    """Shares are max-min fair to within a request: whoever waits has as much as whoever was given."""
    source = random.Random(seed)
    for _ in range(10):
        free, demands = random_demands(schedule, source, tokens_each=source.randint(1, 200))
        admitted = schedule.Admission().admit(free, CAPACITY, demands)
        for poor, rich in itertools.product(demands, demands):
            cost = cost_of(poor)
            has = poor.tokens_in_flight + cost * admitted[poor.tenant]
            waits = admitted[poor.tenant] < poor.num_waiting
            if not waits or has + cost > poor.max_tokens_in_flight or cost_of(rich) != cost:
                continue
            before = rich.tokens_in_flight + cost * (admitted[rich.tenant] - 1)
            assert not admitted[rich.tenant] or before / rich.weight <= has / poor.weight


def check_sizes_do_not_matter(schedule: ModuleType, seed: int) -> None:
    """Tenants with long and short requests get the same memory, and the rest of a long tail."""
    long, short = random.Random(seed).randint(500, 1000), 10
    both = [
        schedule.Demand("long", 1.0, 99, long, 0, CAPACITY),
        schedule.Demand("short", 1.0, 9999, short, 0, CAPACITY),
    ]
    admitted = schedule.Admission().admit(CAPACITY, CAPACITY, both)
    assert abs(admitted["long"] * long - admitted["short"] * short) <= 2 * long
    tail = [schedule.Demand("long", 1.0, 0, long, 2 * long, CAPACITY), both[1]]
    admitted = schedule.Admission().admit(CAPACITY - 2 * long, CAPACITY, tail)
    assert admitted == {"long": 0, "short": (CAPACITY - 2 * long) // short}


def check_large_requests_start(schedule: ModuleType, seed: int) -> None:
    """A request for most of the memory is passed by small ones, but only by one memory full."""
    source = random.Random(seed)
    admission, each = schedule.Admission(), {"large": 9000, "small": source.randint(50, 100)}
    flying = [("small", source.randint(1, 20)) for _ in range(CAPACITY // each["small"])]
    passed = 0
    for now in range(1000):
        flying = [(tenant, end) for tenant, end in flying if end > now]
        held = {name: each[name] * sum(t == name for t, _ in flying) for name in each}
        demands = [schedule.Demand(name, 1.0, 5, each[name], held[name], CAPACITY) for name in each]
        admitted = admission.admit(CAPACITY - sum(held.values()), CAPACITY, demands)
        if admitted["large"]:
            assert passed >= CAPACITY / 2, "small ones could have used what was free"
            return
        passed += admitted["small"] * each["small"]
        assert passed < CAPACITY + each["small"]
        flying += [("small", now + source.randint(1, 20)) for _ in range(admitted["small"])]
    raise AssertionError("the large request never started")


def check_over_commit(schedule: ModuleType, seed: int) -> None:
    """If all requests in flight grew to their longest, they would hold 3 times the memory at most."""
    source = random.Random(seed)
    admission = schedule.Admission(max_over_commit=3.0)
    longest = {"a": 100, "b": 3000}
    assert {name: admission.tokens_each(name, longest[name]) for name in longest} == longest
    each: dict[str, int] = {}
    flying: list[tuple[str, int, int]] = []
    for now in range(300):
        for tenant, _, length in [each for each in flying if each[1] <= now]:
            admission.finished(tenant, length)
        flying = [each for each in flying if each[1] > now]
        each = {name: admission.tokens_each(name, longest[name]) for name in longest}
        held = {name: each[name] * sum(t == name for t, _, _ in flying) for name in longest}
        demands = [schedule.Demand(n, 1.0, 9, each[n], held[n], CAPACITY) for n in longest]
        free = CAPACITY - sum(held.values())
        for name, number in admission.admit(free, CAPACITY, demands).items():
            lengths = [max(1, int(longest[name] * source.random() ** 9)) for _ in range(number)]
            flying += [(name, now + source.randint(1, 9), length) for length in lengths]
        assert sum(longest[tenant] for tenant, _, _ in flying) <= 3.0 * CAPACITY
    assert each["b"] == longest["b"] / 3, "its requests are short, as far as is allowed"


def check_lengths(schedule: ModuleType, seed: int) -> None:
    """What is expected is the mean of what finished, but more at first, and at most the longest."""
    source = random.Random(seed)
    admission = schedule.Admission(100.0)
    admission.finished("a", 10)
    assert admission.tokens_each("a", 1000) > 800, "the first to finish are the short ones"
    lengths = [source.randint(100, 300) for _ in range(2000)]
    for length in lengths:
        admission.finished("a", length)
        admission.finished("long", 5000)
    assert admission.tokens_each("a", 1000) == pytest.approx(200, abs=30)
    assert admission.tokens_each("long", 1000) == 1000
    admission.leave("a")
    assert admission.tokens_each("a", 1000) == 1000


def check_phases(schedule: ModuleType, seed: int) -> None:
    """Each of 20 tenants takes part in one of the next 20 phases, and a phase is not too large."""
    source = random.Random(seed)
    phase = schedule.Phase(max_tenants=5, fill=2.0)
    wanting = {f"t{n}": source.choice([source.randint(1, 5000), 90_000]) for n in range(20)}
    waited = dict.fromkeys(wanting, 0)
    for _ in range(100):
        members = phase.start(CAPACITY, wanting)
        assert members
        assert members == list(wanting)[: len(members)], "nobody is passed over"
        assert len(members) <= 5
        assert len(members) == 1 or sum(wanting[name] for name in members) <= 2 * CAPACITY
        for name in wanting:
            waited[name] = 0 if name in members else waited[name] + 1
            assert waited[name] < 20
        wanting = {n: t for n, t in wanting.items() if n not in members} | {
            name: wanting[name] for name in members
        }


MEMORY_CHECKS = [
    check_fits, check_all_is_used, check_shares, check_sizes_do_not_matter,
    check_large_requests_start, check_over_commit, check_lengths, check_phases,
]  # fmt: skip
