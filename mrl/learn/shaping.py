"""Between rewards and advantages: what is taken off long answers, and which samples leave the loss.

Pure; the rewards of a group stay as they were scored, for metrics and rollouts. G samples of a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.algorithms.dapo import overlong_penalty
from mrl.algorithms.signal import has_signal
from mrl.config import AlgorithmConfig
from mrl.types import Sample, SampleGroup

TRUNCATED = "length"
"""The finish reason of an answer that was cut off."""


def shaped_rewards(group: SampleGroup, config: AlgorithmConfig, max_response_len: int) -> Tensor:
    """f32[G]: the rewards and the soft penalty of long answers (DAPO, arXiv 2503.14476 eq. 13)."""
    assert group.rewards is not None
    if not config.overlong_buffer_len:
        return group.rewards
    lengths = torch.tensor([sample.num_generated for sample in group.samples])
    return group.rewards + overlong_penalty(lengths, max_response_len, config.overlong_buffer_len)


def outside_loss(group: SampleGroup, config: AlgorithmConfig) -> list[bool]:
    """Which samples teach nothing: without a reward; cut off, under `overlong_filter`; of a group
    without a signal, under `dynamic_sampling`, which draws others in their place."""
    assert group.rewards is not None
    flat = config.dynamic_sampling and not has_signal(group.rewards)
    return [
        flat or abstained or (config.overlong_filter and sample.finish_reason == TRUNCATED)
        for sample, abstained in zip(group.samples, group.rewards.isnan().tolist(), strict=True)
    ]


def without_loss(sample: Sample) -> Sample:
    return dataclasses.replace(sample, loss_mask=torch.zeros_like(sample.loss_mask))


def shaping_metrics(
    groups: Sequence[SampleGroup], config: AlgorithmConfig, max_response_len: int
) -> dict[str, float]:
    """What was taken off the rewards, mean over scored samples, and how many answers were cut off and
    so left the loss. Only of what the recipe turns on."""
    metrics: dict[str, float] = {}
    if config.overlong_buffer_len:
        pairs = [(shaped_rewards(g, config, max_response_len), g.rewards) for g in groups]
        off = torch.cat([raw - shaped for shaped, raw in pairs if raw is not None])
        metrics["reward/overlong_penalty"] = float(off.double().nanmean())
    if config.overlong_filter:
        cut = [sample.finish_reason == TRUNCATED for group in groups for sample in group.samples]
        metrics["reward/overlong_filtered"] = float(sum(cut))
    return metrics
