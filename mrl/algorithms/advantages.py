"""Functions that turn the rewards of a complete step into advantages, as the algorithms define
them.

Dimensions: G samples of a group. Each function takes f32[G] rewards for every group and returns
f32[G] advantages for every group, in the same order. Samples without a reward (NaN) get advantage 0
and are left out of every mean and std. If all rewards that a function compares are equal, the
advantages are exactly 0, regardless of rounding in the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrl.config import AlgorithmConfig

Rewards = Sequence[Tensor]

SPREAD_KEYS = ("min_group_std", "advantage_eps")
"""Fields of AlgorithmConfig that algorithms read if they divide rewards by their std."""


def group_normalised(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Compute `(R - mean) / std` over the rewards R of each group (GRPO, arXiv 2402.03300 sec.
    4.1.2).

    The std is the sample std (divisor G - 1), as in TRL and verl. It is at least `min_group_std`,
    and `advantage_eps` is added to it. The advantage is 0 if only one sample has a reward.
    """
    return _each(rewards, lambda values: _centred(values) / _spread(values, config))


def group_centred(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Compute `R - mean` over each group's rewards R (Dr.GRPO, arXiv 2503.20783 section 3.2)."""
    return _each(rewards, _centred)


def leave_one_out(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Subtract from each reward the mean reward of the group's other samples (RLOO, arXiv
    2402.14740 eq. 5).

    This equals `(R - mean) * G / (G - 1)`. The advantage is 0 if only one sample has a reward.
    """
    return _each(rewards, lambda v: _centred(v) * (len(v) / max(len(v) - 1, 1)))


def group_normalised_turns(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Compute `(r - mean) / std` for the turn rewards r of one group. The mean and the std are over
    all turns of all samples of the group.

    Takes and returns f32[turns] for each sample that has a reward. The advantage of a token is
    later the sum of these values over the token's turn and all turns after it, which is GRPO with
    process supervision (arXiv 2402.03300 section 4.1.3).
    """
    (found,) = group_normalised([torch.cat(list(rewards))], config)
    return list(found.split([len(own) for own in rewards]))


def raw_rewards(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Return the rewards themselves, with 0 in place of NaN. The training loop later subtracts a
    critic's values, token penalties or the step's mean."""
    return _each(rewards, lambda values: values)


def _each(rewards: Rewards, compute: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [_scored(group, compute) for group in rewards]


def _scored(rewards: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return f32[G]: the result of `compute`, in f64, on the rewards that are not NaN, and 0 for
    NaN. Raises ValueError if a reward is infinite."""
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
