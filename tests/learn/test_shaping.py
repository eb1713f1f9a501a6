"""Penalties of overlong answers, and the samples that leave the loss: pure, by hand."""

from __future__ import annotations

import math

import pytest

from mrl.algorithms import dapo
from mrl.config import AlgorithmConfig
from mrl.learn.advantages import compare_rewards
from mrl.learn.step_data import make_step_data, shaping_metrics
from mrl.types import SampleGroup
from tests.sample_groups import group, sample


def in_loss(one: SampleGroup) -> list[bool]:
    return [bool(s.loss_mask.any()) for s in one.samples]


def test_a_long_answer_loses_up_to_one_and_its_raw_reward_stays() -> None:
    config = AlgorithmConfig(name="dapo", overlong_buffer_len=4)
    one = group([1.0, 1.0, 1.0], 0, sample(6), sample(8), sample(10, "length"))
    data = make_step_data([one], dapo, config, max_response_len=10)
    advantages = compare_rewards(data.rewards, data.num_loss_tokens, dapo, config)
    assert one.rewards is not None
    assert one.rewards.tolist() == [1.0, 1.0, 1.0]
    assert advantages.tolist() == pytest.approx([1.0, 0.0, -1.0], abs=1e-3)  # of 1, 0.5 and 0
    assert shaping_metrics(data, config) == {"reward/overlong_penalty": 0.5}
    assert shaping_metrics(data, AlgorithmConfig()) == {}


def test_a_cut_off_answer_leaves_the_loss_but_not_the_baseline() -> None:
    config = AlgorithmConfig(name="dapo", overlong_filter=True)
    one = group([1.0, 0.0, 0.0], 0, sample(6), sample(6), sample(10, "length"))
    data = make_step_data([one], dapo, config, 10)
    (trained,) = data.trained_groups
    assert in_loss(one) == [True, True, True]  # what is saved is as it was rolled out
    assert in_loss(trained) == [True, True, False]
    assert data.num_loss_tokens.tolist() == [6, 6, 0]
    advantages = compare_rewards(data.rewards, data.num_loss_tokens, dapo, config)
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-6)  # of all three
    assert shaping_metrics(data, config) == {"reward/overlong_filtered": 1.0}


def test_groups_without_a_signal_leave_the_loss_only_where_others_take_their_place() -> None:
    for on in (False, True):
        flat, split = group([1.0, 1.0]), group([0.0, math.nan, 1.0])
        config = AlgorithmConfig(name="dapo", dynamic_sampling=on)
        flat, split = make_step_data([flat, split], dapo, config, 10).trained_groups
        assert in_loss(flat) == [not on, not on]
        assert in_loss(split) == [True, False, True]
