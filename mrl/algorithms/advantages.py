"""Rewards of a whole step -> advantages, as the algorithms define them.

Dimensions: G samples of a group. Each takes f32[G] of every group and gives f32[G] of every group, in
the same order. Samples without a reward (NaN) get advantage 0 and are left out of every mean and std.
Where all scored rewards that are compared are equal, the advantages are exactly 0, whatever rounding
does to their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrl.config import AlgorithmConfig

Rewards = Sequence[Tensor]

SPREAD_KEYS = ("min_group_std", "advantage_eps")
"""What of AlgorithmConfig is read where rewards are divided by their std."""


def group_normalised(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Compute (R - mean) / std over the group (GRPO, arXiv 2402.03300 section 4.1.2).

    std is the sample one (divides by G - 1), as in TRL and verl, at least `min_group_std`, plus
    `advantage_eps`. A single scored sample has nothing to compare with: 0.
    """
    return _each(rewards, lambda values: _centred(values) / _spread(values, config))


def group_centred(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Compute R - mean over the group (Dr.GRPO, arXiv 2503.20783 section 3.2)."""
    return _each(rewards, _centred)


def leave_one_out(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Compute R - mean of the group's other samples (RLOO, arXiv 2402.14740 eq. 5): (R - mean) G
    / (G - 1)."""
    return _each(rewards, lambda v: _centred(v) * (len(v) / max(len(v) - 1, 1)))


def group_normalised_turns(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Compute (r - mean) / std of the turn rewards of one group, over all turns of its samples.

    f32[turns] of each sample that has a reward, and the same back. The advantage of a token is the sum
    of these from it on: GRPO with process supervision (arXiv 2402.03300 section 4.1.3).
    """
    (found,) = group_normalised([torch.cat(list(rewards))], config)
    return list(found.split([len(own) for own in rewards]))


def raw_rewards(rewards: Rewards, config: AlgorithmConfig) -> list[Tensor]:
    """Return R: a critic's baseline, a penalty of each token or the step's mean is subtracted later."""
    return _each(rewards, lambda values: values)


def _each(rewards: Rewards, compute: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [_scored(group, compute) for group in rewards]


def _scored(rewards: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """`compute` of the f64 rewards that are none of NaN; raises ValueError on an infinite one."""
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
