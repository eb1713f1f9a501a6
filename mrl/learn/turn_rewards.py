"""This module computes what the turns of an environment's episodes are credited with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from mrl.algorithms.base import Algorithm
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.types import Sample, SampleGroup


def with_turn_rewards(
    groups: Sequence[SampleGroup], algorithm: Algorithm, config: AlgorithmConfig
) -> list[SampleGroup]:
    """Return the groups with turn rewards as the algorithm counts them; unchanged without the option.

    Raises InputError for a sample that has a reward and no turn rewards, as one from the file of a run
    without an environment.
    """
    if not config.turn_rewards:
        return list(groups)
    return [
        dataclasses.replace(group, samples=_credited(group, algorithm, config)) for group in groups
    ]


def _credited(group: SampleGroup, algorithm: Algorithm, config: AlgorithmConfig) -> list[Sample]:
    assert group.rewards is not None
    samples = list(group.samples)
    known = [i for i, reward in enumerate(group.rewards.tolist()) if not math.isnan(reward)]
    for i in known:
        if not samples[i].turn_rewards:
            raise InputError(
                f"algorithm.turn_rewards: a sample of {group.prompt.source} has a reward, but no "
                "rewards of turns; roll it out in an environment, or leave turn_rewards out"
            )
    counts = getattr(algorithm, "turn_rewards", None)
    if counts is None or not known:
        return samples
    rewards = [torch.tensor([reward for _, reward in samples[i].turn_rewards]) for i in known]
    for i, own in zip(known, counts(rewards, config), strict=True):
        ends = [end for end, _ in samples[i].turn_rewards]
        credited = tuple(zip(ends, own.tolist(), strict=True))
        samples[i] = dataclasses.replace(samples[i], turn_rewards=credited)
    return samples
