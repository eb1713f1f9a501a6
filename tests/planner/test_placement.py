"""Tests the expected seconds of a step by placement: limits, tails, and what holds for all times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.errors import InputError
from mrl.planner.placement import StepTimes, expected_step_s

seconds = st.floats(0.0, 1e4, allow_subnormal=False)
times = st.builds(StepTimes, seconds, seconds, seconds, seconds)
spreads = st.floats(1.0, 100.0)
modes = st.sampled_from([
    {"in_flight_updates": "finish"}, {"in_flight_updates": "interrupt"}, {"deterministic": True}
])  # fmt: skip
ROUNDING = 1e-9


def test_of_equal_times_turns_take_twice_as_long():
    equal = StepTimes(generate_s=10.0, train_s=10.0, sync_s=0.0)
    turns = expected_step_s(equal, "synchronous")
    both = expected_step_s(equal, "asynchronous", 1)
    assert (turns.step_s, both.step_s) == (20.0, 10.0)
    assert (turns.trainer_idle, turns.rollout_idle) == (0.5, 0.5)
    assert (both.trainer_idle, both.rollout_idle, both.waits) == (0.0, 0.0, "neither")


def test_without_generation_engines_wait_for_the_whole_step():
    none = expected_step_s(StepTimes(0.0, 7.0, 1.0), "asynchronous", 3, spread=5.0)
    assert (none.step_s, none.rollout_idle, none.trainer_idle) == (8.0, 1.0, 0.0)
    assert none.waits == "rollout"


def test_the_trainer_waits_for_slow_engines():
    slow = expected_step_s(StepTimes(9.0, 2.0, 1.0, load_s=3.0), "asynchronous", 1)
    assert (slow.step_s, slow.trainer_idle_s, slow.rollout_idle_s) == (12.0, 9.0, 0.0)
    assert (slow.waits, slow.trainer_idle) == ("trainer", 0.75)


def test_a_colocated_run_has_no_idle_role_but_a_tail():
    colocated = expected_step_s(StepTimes(8.0, 4.0, 1.0), "colocated", spread=4.0)
    assert (colocated.step_s, colocated.trainer_idle, colocated.rollout_idle) == (13.0, 0.0, 0.0)
    assert colocated.tail_s == 6.0


def test_the_bound_shares_out_the_tail():
    long_tail = StepTimes(generate_s=12.0, train_s=1.0, sync_s=0.0)  # a full engine needs 3
    finish = [expected_step_s(long_tail, "asynchronous", n, spread=4.0) for n in (1, 3, 9)]
    assert [each.step_s for each in finish] == [12.0, 6.0, 4.0]
    interrupt = [
        expected_step_s(long_tail, "asynchronous", n, spread=4.0, in_flight_updates="interrupt")
        for n in (1, 2, 4, 8)
    ]
    assert [each.step_s for each in interrupt] == [12.0, 6.0, 3.0, 3.0]
    assert [each.tail_s for each in interrupt] == [9.0, 3.0, 0.0, 0.0]
    whole = expected_step_s(long_tail, "asynchronous", 8, spread=4.0, deterministic=True)
    assert whole.step_s == 12.0


def test_by_a_fixed_schedule_with_bound_1_weights_travel_while_the_engine_waits():
    parts = StepTimes(generate_s=5.0, train_s=4.0, sync_s=2.0, load_s=1.0)
    steps = [expected_step_s(parts, "asynchronous", n, deterministic=True) for n in (1, 2)]
    assert [each.step_s for each in steps] == [8.0, 6.0]
    assert [each.rollout_idle_s for each in steps] == [2.0, 0.0]
    assert expected_step_s(parts, "asynchronous", 1).step_s == 6.0


def test_more_devices_make_a_part_faster():
    assert StepTimes(8.0, 6.0, 1.0, 2.0).scaled(generate=2.0, train=3.0) == StepTimes(
        4.0, 2.0, 1.0, 2.0
    )


@given(times, spreads, modes, st.integers(1, 20))
def test_a_higher_bound_never_takes_longer(parts: StepTimes, spread: float, mode, bound: int):
    turns = expected_step_s(parts, "synchronous", spread=spread).step_s
    now = expected_step_s(parts, "asynchronous", bound, spread=spread, **mode).step_s
    more = expected_step_s(parts, "asynchronous", bound + 1, spread=spread, **mode).step_s
    assert more <= now * (1 + ROUNDING)
    assert now <= turns * (1 + ROUNDING)
    assert now * (1 + ROUNDING) >= max(
        parts.train_s + parts.sync_s, parts.generate_s / spread + parts.load_s
    )
    assert now * (1 + spread) * (1 + ROUNDING) >= turns


@given(times, spreads, modes, st.integers(1, 20))
def test_one_side_at_least_never_waits(parts: StepTimes, spread: float, mode, bound: int):
    step = expected_step_s(parts, "asynchronous", bound, spread=spread, **mode)
    assert 0 <= step.trainer_idle <= 1
    assert 0 <= step.rollout_idle <= 1
    assert step.tail_s >= -ROUNDING
    if not (mode.get("deterministic") and bound == 1):
        assert min(step.trainer_idle_s, step.rollout_idle_s) == 0
    busy = parts.train_s + parts.sync_s
    assert step.trainer_idle_s + busy == pytest.approx(step.step_s)


@pytest.mark.parametrize(
    ("placement", "bound", "spread", "text"),
    [
        ("asynchronous", 0, 1.0, "expected at least 1 for asynchronous"),
        ("synchronous", 1, 1.0, "expected 0 for synchronous"),
        ("colocated", 2, 1.0, "expected 0 for colocated"),
        ("synchronous", 0, 0.5, "spread: got 0.5"),
    ],
)
def test_refuses_what_cannot_be(placement, bound: int, spread: float, text: str):
    with pytest.raises(InputError, match=text):
        expected_step_s(StepTimes(1.0, 1.0, 1.0), placement, bound, spread=spread)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_refuses_times_that_are_none(wrong: float):
    with pytest.raises(InputError, match=r"StepTimes\.train_s"):
        StepTimes(1.0, wrong, 1.0)
