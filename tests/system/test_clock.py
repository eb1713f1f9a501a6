"""The clock of a step: its parts add up to the time that passed."""

from __future__ import annotations

import time

import pytest

from mrl.system.clock import Clock


def test_a_nested_part_is_not_counted_in_the_outer_one() -> None:
    clock = Clock()
    with clock.part("train"):
        with clock.part("diagnosis"):
            time.sleep(0.05)
        with pytest.raises(ValueError, match="lost") as error, clock.part("diagnosis"):
            raise ValueError("lost")
    with clock.part("train"):
        pass
    (begin, end, name), _ = clock.spans
    assert name == "train"
    assert clock.seconds["diagnosis"] >= 0.05
    assert sum(clock.seconds.values()) <= clock.elapsed_s
    assert clock.seconds["train"] <= end - begin - 0.05 + 1e-2
    assert error.value.phase == "diagnosis"  # pyright: ignore[reportAttributeAccessIssue]
