"""What each token is credited with: a critic's values, KL in the reward, GAE, whitening.

Everything is over the whole step and all ranks before it is normalised, so no split of it matters.
N packed tokens of a micro-batch, B its sequences, S samples of the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.algorithms import gae
from mrl.algorithms.advantages import SPREAD_KEYS
from mrl.algorithms.base import Algorithm, either, traits
from mrl.config import AlgorithmConfig
from mrl.learn.kl_control import Penalties
from mrl.types import MicroBatch
from parallel.mesh import Mesh
from parallel.packing import to_device
from parallel.sample_sums import sample_sums


def credits_tokens(algorithm: Algorithm, kl_in_reward: bool) -> bool:
    """Whether a token has an advantage of its own; else its sequence has one."""
    own = traits(algorithm).needs_critic
    return own or (kl_in_reward and hasattr(algorithm, "token_advantages"))


def with_token_advantages(
    batches: Sequence[MicroBatch],
    values: Sequence[Tensor],
    penalties: Penalties | None,
    algorithm: Algorithm,
    config: AlgorithmConfig,
    num_samples: int,
    mesh: Mesh,
) -> tuple[list[MicroBatch], dict[str, float]]:
    """The micro-batches with token advantages, returns and old values, and `value/*` over all ranks.

    values: f32[N] a micro-batch on the last pipeline stage, none elsewhere: there nothing is added. The
    advantages of the batches are the rewards. A collective.
    """
    compute = getattr(algorithm, "token_advantages", gae.token_advantages)
    results: list[tuple[Tensor, Tensor]] = []
    for number, own in enumerate(values):
        batch = to_device(batches[number], own.device)
        off = None if penalties is None else penalties.tokens[number]
        results.append(compute(own, batch.advantages, off, batch, config))
    columns = [
        _moments(advantages, returns, own)
        for (advantages, returns), own in zip(results, values, strict=True)
    ]
    sums = sample_sums(columns, batches, num_samples, mesh)
    total = [math.fsum(column) for column in sums.T.tolist()]
    count, first, second = total[:3]
    if either(config.whiten, traits(algorithm).whitens):
        mean, std = gae.mean_and_std(torch.tensor([count, first, second], dtype=torch.float64))
        if set(SPREAD_KEYS) <= (traits(algorithm).reads or set()):
            spread = max(std, config.min_group_std) + config.advantage_eps
        else:
            spread = std + gae.WHITEN_EPS
        results = [(gae.whiten(a, mean, spread), returns) for a, returns in results]
    filled = [
        dataclasses.replace(batch, token_advantages=a, returns=returns, old_values=own)
        for batch, (a, returns), own in zip(batches, results, values, strict=False)
    ]
    return filled or list(batches), _value_metrics(total)


def _moments(advantages: Tensor, returns: Tensor, values: Tensor) -> Tensor:
    """f64[N, 7]: 1, A, A^2, R, R^2, R - V, (R - V)^2."""
    a, r, v = advantages.double(), returns.double(), values.double()
    error = r - v
    return torch.stack(
        [torch.ones_like(a), a, a.square(), r, r.square(), error, error.square()], dim=1
    )


def _value_metrics(total: Sequence[float]) -> dict[str, float]:
    """Of the sums of `_moments`. Explained variance: 1 - Var(R - V) / Var(R), NaN of equal returns."""
    count = max(total[0], 1.0)
    _, advantage, _, mean, square, bias, error = (value / count for value in total)
    spread, left = square - mean * mean, error - bias * bias
    return {
        "value/advantage_mean": advantage,
        "value/return_mean": mean,
        "value/explained_variance": 1.0 - left / spread if spread > 1e-12 else math.nan,
    }


def with_penalised_advantages(
    batches: Sequence[MicroBatch],
    rewards: Sequence[Tensor],
    penalties: Penalties,
    algorithm: Algorithm,
    config: AlgorithmConfig,
) -> list[MicroBatch]:
    """The micro-batches with the advantages of rewards that each sample's penalties are taken off.

    rewards: f32[G] of all groups of the step, S samples in all, the same on every rank. A sample
    outside the loss, whose reward still counts, pays the mean of its group: were it free, it would
    look better than those that pay.
    """
    sizes = [len(group) for group in rewards]
    paid = penalties.samples.to(torch.float32).split(sizes)
    off = [
        torch.where(has, own, own[has].mean()) if bool(has.any()) else own
        for own, has in zip(paid, penalties.has_tokens.split(sizes), strict=True)
    ]
    advantages = torch.cat(
        algorithm.advantages([r - p for r, p in zip(rewards, off, strict=True)], config)
    )
    filled = []
    for batch in batches:
        ids = batch.sample_ids
        assert ids is not None
        own = torch.where(ids >= 0, advantages[ids.clamp(min=0)], 0.0)
        filled.append(dataclasses.replace(batch, advantages=own))
    return filled
