"""Scores sample groups by reward functions: their completions, or the last answers of conversations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mrl.rewards.runner import RewardRunner
from mrl.types import SampleGroup


def judged(
    runner: RewardRunner, group: SampleGroup, texts: Sequence[str], *, step_samples: int
) -> Tensor:
    """Return the rewards f32[G] of a group, and set its `reward_parts`, as `RewardRunner.score_group`.

    If the group has `answers`, these are judged instead of `texts`, and only those of samples that are
    not masked; the rewards of masked samples stay NaN.
    """
    if group.answers is None:
        return runner.score_group(group, list(texts), step_samples=step_samples)
    assert group.rewards is not None
    kept = [k for k, reward in enumerate(group.rewards.tolist()) if not math.isnan(reward)]
    rewards = torch.full((len(group.samples),), math.nan)
    if not kept:
        return rewards
    part = replace(group, samples=[group.samples[k] for k in kept], rewards=None)
    answers = [group.answers[k] for k in kept]
    rewards[kept] = runner.score_group(part, answers, step_samples=step_samples)
    if part.reward_parts is not None:
        group.reward_parts = {}
        for name, values in part.reward_parts.items():
            group.reward_parts[name] = torch.full_like(rewards, math.nan)
            group.reward_parts[name][kept] = values
    return rewards
