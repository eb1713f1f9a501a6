"""Rewards of long answers, samples that leave the loss, rounds of dynamic sampling: pure, by hand."""

from __future__ import annotations

import dataclasses
import math
from itertools import count
from pathlib import Path

import pytest
import torch

from mrl.algorithms import dapo
from mrl.collect.dynamic_sampling import SignalRounds
from mrl.config import AlgorithmConfig, RolloutConfig
from mrl.learn.batching import drop_from_loss, set_advantages
from mrl.learn.shaping import shaping_metrics
from mrl.run.folder import RunFolder, rollout_lines
from mrl.types import Prompt, Sample, SampleGroup, VersionSpan

PROMPT_LEN = 2


def sample(length: int, reason: str = "stop", group_id: int = 0) -> Sample:
    total = PROMPT_LEN + length
    return Sample(
        group_id=group_id,
        token_ids=torch.arange(total),
        prompt_len=PROMPT_LEN,
        loss_mask=torch.arange(total) >= PROMPT_LEN,
        rollout_logprobs=torch.zeros(total),
        weight_versions=(VersionSpan(0, PROMPT_LEN, total),),
        finish_reason=reason,
    )


def prompt(number: int) -> Prompt:
    return Prompt(str(number), torch.arange(PROMPT_LEN), "?", {}, f"prompts:{number}")


def group(rewards: list[float], group_id: int = 0, *samples: Sample) -> SampleGroup:
    own = samples or [sample(4, group_id=group_id) for _ in rewards]
    return SampleGroup(prompt(group_id), list(own), torch.tensor(rewards))


def in_loss(one: SampleGroup) -> list[bool]:
    return [bool(s.loss_mask.any()) for s in one.samples]


def test_a_long_answer_loses_up_to_one_and_its_raw_reward_stays() -> None:
    config = AlgorithmConfig(name="dapo", overlong_buffer_len=4)
    one = group([1.0, 1.0, 1.0], 0, sample(6), sample(8), sample(10, "length"))
    set_advantages([one], dapo, config, max_response_len=10)
    assert one.rewards is not None
    assert one.rewards.tolist() == [1.0, 1.0, 1.0]
    assert one.advantages is not None  # of 1, 0.5 and 0
    assert one.advantages.tolist() == pytest.approx([1.0, 0.0, -1.0], abs=1e-3)
    assert shaping_metrics([one], config, 10) == {"reward/overlong_penalty": 0.5}
    assert shaping_metrics([one], AlgorithmConfig(), 10) == {}


def test_a_cut_off_answer_leaves_the_loss_but_not_the_baseline() -> None:
    config = AlgorithmConfig(name="dapo", overlong_filter=True)
    one = group([1.0, 0.0, 0.0], 0, sample(6), sample(6), sample(10, "length"))
    set_advantages([one], dapo, config, 10)
    assert in_loss(one) == [True, True, True]  # what is saved is as it was rolled out
    drop_from_loss([one], config)
    assert in_loss(one) == [True, True, False]
    assert one.advantages is not None
    assert float(one.advantages.sum()) == pytest.approx(0.0, abs=1e-6)  # of all three
    assert shaping_metrics([one], config, 10) == {"reward/overlong_filtered": 1.0}


def test_groups_without_a_signal_leave_the_loss_only_where_others_take_their_place() -> None:
    for on in (False, True):
        flat, split = group([1.0, 1.0]), group([0.0, math.nan, 1.0])
        config = AlgorithmConfig(name="dapo", dynamic_sampling=on)
        drop_from_loss([flat, split], config)
        assert in_loss(flat) == [not on, not on]
        assert in_loss(split) == [True, False, True]


def test_the_record_of_a_sample_says_how_old_its_oldest_token_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    spans = (VersionSpan(3, PROMPT_LEN, 4), VersionSpan(5, 4, 8))
    resumed = dataclasses.replace(sample(6), weight_versions=spans)
    one = group([0.0, 1.0], 0, resumed, dataclasses.replace(resumed, weight_versions=spans[1:]))
    folder.write_rollouts(5, [rollout_lines(5, one, ["a", "b"])])
    rows = folder.read_rollouts(5)
    assert [row["weight_version"] for row in rows] == [5, 5]
    assert [row["staleness"] for row in rows] == [2, 0]


CONFIG = RolloutConfig(
    max_response_len=4, prompts_per_step=4, samples_per_prompt=2, dynamic_sampling_rounds=3
)


def test_rounds_draw_what_is_missing_until_all_groups_have_a_signal() -> None:
    numbers = count(4)
    drawn: list[int] = []

    def draw(num: int) -> list[Prompt]:
        drawn.append(num)
        return [prompt(next(numbers)) for _ in range(num)]

    rounds = SignalRounds(CONFIG)
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
    rounds = SignalRounds(CONFIG)
    for number in range(3):
        rounds.add([group([1, 1], 2 * number), group([0, int(number == 1)], 2 * number + 1)])
    assert rounds.is_over
    assert rounds.num_missing == 3
    chosen = rounds.result()
    assert [g.samples[0].group_id for g in chosen] == [0, 1, 2, 3]
    assert rounds.metrics()["dynamic_sampling/missing_groups"] == 3
