"""Rounds of dynamic sampling: pure, by hand."""

from __future__ import annotations

import math
from itertools import count

import pytest

from mrl.collect.dynamic_sampling import DynamicSampling
from mrl.config import RolloutConfig
from mrl.types import Prompt
from tests.sample_groups import group, prompt

CONFIG = RolloutConfig(
    max_response_len=4, prompts_per_step=4, samples_per_prompt=2, dynamic_sampling_rounds=3
)


def test_rounds_draw_what_is_missing_until_all_groups_have_a_signal() -> None:
    numbers = count(4)
    drawn: list[int] = []

    def draw(num: int) -> list[Prompt]:
        drawn.append(num)
        return [prompt(next(numbers)) for _ in range(num)]

    rounds = DynamicSampling(CONFIG)
    rounds.add([group([0, 1], 0), group([1, 1], 1), group([0, 0], 2), group([math.nan, 1], 3)])
    assert not rounds.is_over
    plan = rounds.next_round(draw, seed=7)
    assert [one.group.samples[0].group_id for one in plan.started] == [4, 5, 6]
    assert plan.num_wanted == 3
    assert all(one.seed != 7 for one in plan.started)  # a prompt drawn again gets other samples
    rounds.add([group([0, 1], 4), group([1, 1], 5), group([1, 0], 6)])
    rounds.next_round(draw, seed=7)
    rounds.add([group([0, 1], 7)])
    assert rounds.is_over
    assert drawn == [3, 1]
    assert [g.samples[0].group_id for g in rounds.result()] == [0, 4, 6, 7]
    found = rounds.metrics()
    assert found["dynamic_sampling/rounds"] == 3
    assert found["dynamic_sampling/prompts_drawn"] == 8
    assert found["dynamic_sampling/missing_groups"] == 0
    causes = {k.rpartition("/")[2]: v for k, v in found.items() if "zero_signal/" in k}
    assert causes == {"unscored": 1, "best": 2, "worst": 1, "equal": 0}
    assert found["dynamic_sampling/reward_mean_drawn"] == pytest.approx(9 / 15)


def test_after_the_last_round_the_step_is_filled_up_with_groups_that_teach_nothing() -> None:
    rounds = DynamicSampling(CONFIG)
    for number in range(3):
        rounds.add([group([1, 1], 2 * number), group([0, int(number == 1)], 2 * number + 1)])
    assert rounds.is_over
    assert rounds.num_missing == 3
    chosen = rounds.result()
    assert [g.samples[0].group_id for g in chosen] == [0, 1, 2, 3]
    assert rounds.metrics()["dynamic_sampling/missing_groups"] == 3
