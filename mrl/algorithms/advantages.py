"""Functions that turn the rewards of a complete step into advantages.

Unless noted otherwise, a function takes the f32[G] rewards of every group and returns the f32[G]
advantages of every group, in the same order; G is the number of samples of a group. Samples without
a reward (NaN) get advantage 0 and are left out of every mean and std. If the rewards of a group are
all equal, advantages relative to the group are exactly 0, regardless of rounding in the mean. Every
function raises ValueError for an infinite reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrl.config import AlgorithmConfig

Rewards = Sequence[Tensor]

SPREAD_KEYS = ("min_group_std", "advantage_eps")
"""Fields of AlgorithmConfig that algorithms read if they divide rewards or advantages by a std."""


def group_normalised(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Compute `(R - mean) / std`, with the mean and the std of the rewards R of the same group
    (GRPO, arXiv 2402.03300 section 4.1.2).

    The std is the sample std (divisor G - 1), as in TRL and verl. It is raised to `min_group_std`
    if it is lower, then `advantage_eps` is added. The advantage is 0 if only one sample of the
    group has a reward.
    """
    return _each(rewards, lambda values: _centred(values) / _spread(values, config))


def group_centred(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Compute `R - mean`, with the mean of the rewards R of the same group (Dr.GRPO, arXiv
    2503.20783 section 3.2)."""
    return _each(rewards, _centred)


def leave_one_out(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Subtract from each reward the mean reward of the group's other samples (RLOO, arXiv
    2402.14740 eq. 5).

    This equals `(R - mean) * G / (G - 1)`, where G counts the samples with a reward. The advantage
    is 0 if only one sample of the group has a reward.
    """
    return _each(rewards, lambda v: _centred(v) * (len(v) / max(len(v) - 1, 1)))


def group_normalised_turns(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Compute `(r - mean) / std` for the turn rewards r of one group, with the mean and the std over
    all turns of all samples of the group.

    Takes and returns f32[turns] for each sample that has a reward. The advantage of a token, which
    the training loop computes later, is the sum of these values over the token's turn and all later
    turns. This is GRPO with process supervision (arXiv 2402.03300 section 4.1.3).
    """
    (found,) = group_normalised([torch.cat(list(rewards))], config)
    return list(found.split([len(own) for own in rewards]))


def raw_rewards(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Return the rewards unchanged, with 0 in place of NaN. The training loop turns them into
    advantages later, with a critic's values or the mean and std of the step."""
    return _each(rewards, lambda values: values)


def _each(rewards: Rewards, compute: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [_scored(group, compute) for group in rewards]


def _scored(rewards: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `compute`, in f64, to those rewards of one group that are not NaN. Return f32[G], with
    0 where the reward is NaN. Raises ValueError if a reward is infinite."""
    if bool(rewards.isinf().any()):
        raise ValueError(f"rewards: got {rewards.tolist()}, expected finite numbers or NaN")
    scored = ~rewards.isnan()
    result = torch.zeros_like(rewards, dtype=torch.float32)
    if bool(scored.any()):
        result[scored] = compute(rewards[scored].double()).float()
    return result


def _centred(values: Tensor) -> Tensor:
    if bool(values.min() == values.max()):
        return torch.zeros_like(values)
    return values - values.mean()


def _spread(values: Tensor, config: AlgorithmConfig) -> float:
    std = float(values.std()) if len(values) > 1 else 0.0
    return max(std, config.min_group_std) + config.advantage_eps
