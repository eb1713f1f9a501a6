"""Penalties of overlong answers, and the samples that leave the loss: pure, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mrl.algorithms import dapo
from mrl.config import AlgorithmConfig
from mrl.learn.advantages import (
    drop_from_loss,
    set_reward_advantages,
    shaping_metrics,
)
from mrl.types import SampleGroup
from tests.sample_groups import group, sample


def in_loss(one: SampleGroup) -> list[bool]:
    return [bool(s.loss_mask.any()) for s in one.samples]


def test_a_long_answer_loses_up_to_one_and_its_raw_reward_stays() -> None:
    config = AlgorithmConfig(name="dapo", overlong_buffer_len=4)
    one = group([1.0, 1.0, 1.0], 0, sample(6), sample(8), sample(10, "length"))
    set_reward_advantages([one], torch.ones(3), dapo, config, max_response_len=10)
    assert one.rewards is not None
    assert one.rewards.tolist() == [1.0, 1.0, 1.0]
    assert one.advantages is not None  # of 1, 0.5 and 0
    assert one.advantages.tolist() == pytest.approx([1.0, 0.0, -1.0], abs=1e-3)
    assert shaping_metrics([one], config, 10) == {"reward/overlong_penalty": 0.5}
    assert shaping_metrics([one], AlgorithmConfig(), 10) == {}


def test_a_cut_off_answer_leaves_the_loss_but_not_the_baseline() -> None:
    config = AlgorithmConfig(name="dapo", overlong_filter=True)
    one = group([1.0, 0.0, 0.0], 0, sample(6), sample(6), sample(10, "length"))
    set_reward_advantages([one], torch.ones(3), dapo, config, 10)
    (trained,) = drop_from_loss([one], config)
    assert in_loss(one) == [True, True, True]  # what is saved is as it was rolled out
    assert in_loss(trained) == [True, True, False]
    assert one.advantages is not None
    assert float(one.advantages.sum()) == pytest.approx(0.0, abs=1e-6)  # of all three
    assert shaping_metrics([one], config, 10) == {"reward/overlong_filtered": 1.0}


def test_groups_without_a_signal_leave_the_loss_only_where_others_take_their_place() -> None:
    for on in (False, True):
        flat, split = group([1.0, 1.0]), group([0.0, math.nan, 1.0])
        config = AlgorithmConfig(name="dapo", dynamic_sampling=on)
        flat, split = drop_from_loss([flat, split], config)
        assert in_loss(flat) == [not on, not on]
        assert in_loss(split) == [True, False, True]
