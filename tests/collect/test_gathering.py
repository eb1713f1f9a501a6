"""How long turns that are ready wait for others."""

import pytest

from mrl.collect.gathering import FIRST_STEP_S, GAP, MOST, Gathering


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def gathering() -> tuple[Gathering, Clock]:
    clock = Clock()
    return Gathering(clock), clock


def test_a_turn_waits_until_the_burst_is_over() -> None:
    turns, clock = gathering()
    turns.note_ready()
    gap = GAP * FIRST_STEP_S
    assert turns.wait_s(8) == pytest.approx(gap)
    clock.now += 0.8 * gap
    turns.note_ready()
    assert turns.wait_s(8) == pytest.approx(gap)  # the burst goes on
    clock.now += 1.1 * gap
    assert turns.wait_s(8) == 0


def test_nobody_waits_longer_than_the_limit_in_a_burst_without_end() -> None:
    turns, clock = gathering()
    waited_s = -clock.now
    while True:
        turns.note_ready()
        if not turns.wait_s(1000):
            break
        clock.now += 0.9 * GAP * FIRST_STEP_S
    waited_s += clock.now
    assert waited_s == pytest.approx(MOST * FIRST_STEP_S, abs=GAP * FIRST_STEP_S)
    turns.note_ready()  # the next burst has a limit of its own
    assert turns.wait_s(1000) > 0


def test_turns_are_sent_at_once_when_no_other_is_left() -> None:
    turns, _ = gathering()
    turns.note_ready()
    assert turns.wait_s(2) > 0
    turns.note_ready()
    assert turns.wait_s(2) == 0


def test_a_slow_engine_is_waited_for_longer() -> None:
    turns, _ = gathering()
    for _ in range(200):
        turns.note_turn(seconds=10.0, num_tokens=10)
    turns.note_ready()
    assert turns.wait_s(8) == pytest.approx(GAP * 1.0, rel=0.01)
    turns.note_turn(seconds=1.0, num_tokens=0)  # a turn without tokens counts as one of one
    assert turns.wait_s(8) == pytest.approx(GAP * 1.0, rel=0.01)
