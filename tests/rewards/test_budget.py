"""The rewards of a step share a limit of wall seconds."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mrl.errors import RunFailed
from mrl.rewards.budget import Budget


def spend(budget: Budget, seconds: float) -> float:
    with budget.spending(10.0) as left_s:
        time.sleep(seconds)
    return left_s


def test_what_is_spent_is_no_longer_there_until_the_next_step() -> None:
    budget = Budget(0.3)
    assert spend(budget, 0.2) == 0.3
    assert spend(budget, 0.2) <= 0.1
    with pytest.raises(RunFailed, match=r"used the 0\.3 s per step .*tenants\.max_reward_s"):
        spend(budget, 0.0)
    budget.begin_step()
    assert spend(budget, 0.0) == 0.3


def test_calls_at_the_same_time_count_once() -> None:
    budget = Budget(5.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: spend(budget, 0.3), range(8)))
    assert 3.0 < spend(budget, 0.0) <= 4.7  # eight times 0.3 would leave 2.6


def test_a_call_has_no_more_than_its_own_limit() -> None:
    with Budget().spending(10.0) as left_s:
        assert left_s == 10.0
