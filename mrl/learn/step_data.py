"""Derive the data that a step trains on from its scored groups.

This module shapes rewards, removes unusable samples from the loss, transforms turn rewards and finds
stale route rows (`moe.provenance`). Every rank has the necessary data of all samples, so all ranks
compute the same result without communication.

G samples of a group, S samples of the step, T tokens of a sample.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.provenance import without_stale_tokens
from mrl.algorithms.base import Algorithm
from mrl.algorithms.dapo import shaped_rewards
from mrl.algorithms.signal import has_signal
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.types import Sample, SampleGroup

TRUNCATED = "length"
"""The finish reason of a response that was cut off at the length limit."""


@dataclass(frozen=True)
class StepData:
    """The groups of a step, and all data that is derived from them before the first forward pass."""

    groups: list[SampleGroup]
    """The groups as they were rolled out and scored; only their advantages are set later."""
    rewards: list[Tensor]
    """f32[G] of each group: the shaped rewards, NaN for a sample without a reward."""
    trained_groups: list[SampleGroup]
    """Copies of the groups with the loss masks and turn rewards that training uses."""
    stale_rows: list[Tensor | None]
    """For each of the S samples, bool[T-1] that is true for the route rows that are not
    replayed; None for a sample without such rows."""
    num_loss_tokens: Tensor
    """i64[S]: the number of loss tokens of each sample."""

    @property
    def samples(self) -> list[Sample]:
        """All samples of `trained_groups`."""
        return samples_of(self.trained_groups)


def make_step_data(
    groups: list[SampleGroup],
    algorithm: Algorithm,
    config: AlgorithmConfig,
    max_response_len: int,
    *,
    uses_routes: bool = False,
    replays_routes: bool = False,
) -> StepData:
    """Derive the data that a step trains on from its scored `groups`, which are not changed.

    uses_routes: whether the engine's routes are replayed or compared; if so, stale route rows are
    searched for. replays_routes: whether the routes are replayed; if so, tokens predicted from
    stale rows are masked.

    Raises InputError if a sample lacks turn rewards although `algorithm.turn_rewards` is set.
    Raises ValueError if it is unknown which weight version sampled a loss token of a sample with
    routes.
    """
    rewards = [shaped_rewards(group, config, max_response_len) for group in groups]
    trained = [_mask_useless(group, config) for group in groups]
    if config.turn_rewards:
        trained = [_with_turn_rewards(group, algorithm, config) for group in trained]
    samples = samples_of(trained)
    stale: list[Tensor | None] = [None for _ in samples]
    if uses_routes:
        kept, stale = without_stale_tokens(samples)
        if replays_routes:
            samples, remaining = kept, iter(kept)
            trained = [
                dataclasses.replace(group, samples=[next(remaining) for _ in group.samples])
                for group in trained
            ]
    num_loss_tokens = torch.stack([sample.loss_mask.sum() for sample in samples])
    return StepData(groups, rewards, trained, stale, num_loss_tokens)


def samples_of(groups: Sequence[SampleGroup]) -> list[Sample]:
    """Return the samples of all groups, in order."""
    return [sample for group in groups for sample in group.samples]


def shaping_metrics(data: StepData, config: AlgorithmConfig) -> dict[str, float]:
    """Return the metrics of `overlong_buffer_len` and `overlong_filter`; {} without these options.

    `reward/overlong_penalty`: the mean amount, at least 0, by which the penalty lowers the reward of
    a scored sample. `reward/overlong_filtered`: the number of truncated answers.
    """
    metrics: dict[str, float] = {}
    if config.overlong_buffer_len:
        pairs = zip(data.groups, data.rewards, strict=True)
        penalties = [g.rewards - shaped for g, shaped in pairs if g.rewards is not None]
        metrics["reward/overlong_penalty"] = float(torch.cat(penalties).double().nanmean())
    if config.overlong_filter:
        truncated = [s.finish_reason == TRUNCATED for g in data.groups for s in g.samples]
        metrics["reward/overlong_filtered"] = float(sum(truncated))
    return metrics


def without_loss(sample: Sample) -> Sample:
    """Return the sample with no token in the loss."""
    return dataclasses.replace(sample, loss_mask=torch.zeros_like(sample.loss_mask))


def _mask_useless(group: SampleGroup, config: AlgorithmConfig) -> SampleGroup:
    """Return the group with all tokens of its unusable samples removed from the loss.

    A sample is unusable if it has no reward, or if it was truncated and `overlong_filter` is set.
    With `dynamic_sampling`, all samples of a group are also unusable if the group has zero variance
    and no replacement for it was found.
    """
    assert group.rewards is not None
    is_flat = config.dynamic_sampling and not has_signal(group.rewards)
    samples = [
        without_loss(sample)
        if is_flat or unscored or (config.overlong_filter and sample.finish_reason == TRUNCATED)
        else sample
        for sample, unscored in zip(group.samples, group.rewards.isnan().tolist(), strict=True)
    ]
    return dataclasses.replace(group, samples=samples)


def _with_turn_rewards(
    group: SampleGroup, algorithm: Algorithm, config: AlgorithmConfig
) -> SampleGroup:
    """Return the group, with its turn rewards transformed by the algorithm.

    If the algorithm has no `turn_rewards`, the group is returned unchanged. Raises InputError for a
    sample that has a reward and no turn rewards, as in the saved rollouts of a run without an
    environment.
    """
    assert group.rewards is not None
    samples = list(group.samples)
    scored = [i for i, reward in enumerate(group.rewards.tolist()) if not math.isnan(reward)]
    for i in scored:
        if not samples[i].turn_rewards:
            raise InputError(
                f"algorithm.turn_rewards: a sample of {group.prompt.source} has a reward, but no "
                "rewards of turns; roll it out in an environment, or leave turn_rewards out"
            )
    count = getattr(algorithm, "turn_rewards", None)
    if count is None or not scored:
        return group
    rewards = [torch.tensor([reward for _, reward in samples[i].turn_rewards]) for i in scored]
    for i, counted in zip(scored, count(rewards, config), strict=True):
        ends = [end for end, _ in samples[i].turn_rewards]
        credited = tuple(zip(ends, counted.tolist(), strict=True))
        samples[i] = dataclasses.replace(samples[i], turn_rewards=credited)
    return dataclasses.replace(group, samples=samples)
