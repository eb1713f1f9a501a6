"""Numbers of each source of a mixture, equal on every rank."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mrl.learn.rollout_metrics import source_metrics
from mrl.run.rollouts import decode_groups, encode_groups, outline
from mrl.types import SampleGroup
from tests.sample_groups import group, sample


def of_source(name: str | None, whole: SampleGroup) -> SampleGroup:
    return dataclasses.replace(whole, prompt=dataclasses.replace(whole.prompt, source_name=name))


def test_each_source_has_its_numbers_on_every_rank():
    cut = dataclasses.replace(sample(9), finish_reason="length")
    groups = [
        of_source("math", group([0.0, 1.0], 0, sample(6), cut)),
        of_source("a b/c*.csv", group([0.5, 0.5], 1)),
        of_source("math", group([1.0, math.nan], 2, sample(3), sample(2))),
    ]
    found = source_metrics(groups)
    assert found == {
        "source/math/samples": 4,
        "source/math/reward_mean": pytest.approx(2 / 3),
        "source/math/reward_std": pytest.approx(math.sqrt(2) / 3),
        "source/math/unscored": 1,
        "source/math/zero_variance_share": 0.5,
        "source/math/response_len": 5,
        "source/math/response_len_max": 9,
        "source/math/truncated": 0.25,
        "source/a_b_c_.csv/samples": 2,
        "source/a_b_c_.csv/reward_mean": 0.5,
        "source/a_b_c_.csv/reward_std": 0,
        "source/a_b_c_.csv/unscored": 0,
        "source/a_b_c_.csv/zero_variance_share": 1,
        "source/a_b_c_.csv/response_len": 4,
        "source/a_b_c_.csv/response_len_max": 4,
        "source/a_b_c_.csv/truncated": 0,
    }
    # What another rank knows of groups that it did not generate.
    sent = encode_groups([outline(each) for each in groups], with_routes=False, with_tokens=False)
    assert source_metrics(decode_groups(sent)) == found
    assert source_metrics([of_source(None, groups[0])]) == {}
