"""Compute the advantages of a step from its shaped rewards (`mrl.learn.step_data`).

The KL penalty is subtracted from the rewards if `algorithm.kl_in` is `reward`. Then either the
rewards of each group are compared, or each token gets its own advantage, from GAE over a critic's
values or from Monte Carlo returns. Some algorithms then whiten the advantages over the loss tokens
of the step. Sums are taken over the whole step and all ranks before anything is normalised, so the
result has the same bits however the step is split into micro-batches and over ranks.

G samples of a group, S samples of the step, N packed tokens of a micro-batch, B its sequences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms import gae
from mrl.algorithms.advantages import SPREAD_KEYS
from mrl.algorithms.base import Algorithm, or_default, traits
from mrl.algorithms.episodes import of_episodes, of_samples
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.learn.kl_control import Penalties
from mrl.types import MicroBatch, SampleGroup
from parallel.mesh import Mesh
from parallel.packing import to_device
from parallel.reduce import sample_sums


@dataclass(frozen=True)
class Advantages:
    """The advantages of a step, as one rank holds them."""

    batches: list[MicroBatch]
    """This rank's micro-batches with their advantages."""
    samples: Tensor
    """f32[S], the same on every rank: the advantage of each sample. If each token has its own
    advantage, this is the mean over the sample's loss tokens; it is 0 for a sample without a
    loss token."""
    metrics: dict[str, float]
    """The metrics `value/*` over all ranks; empty without a critic."""


def compute_advantages(
    batches: Sequence[MicroBatch],
    rewards: Sequence[Tensor],
    num_loss_tokens: Tensor,
    algorithm: Algorithm,
    config: AlgorithmConfig,
    mesh: Mesh,
    *,
    penalties: Penalties | None = None,
    values: Sequence[Tensor] | None = None,
    values_after: Sequence[Tensor] | None = None,
) -> Advantages:
    """Compute the advantages of a step. A collective if `credits_tokens` is true.

    rewards: the shaped rewards of each group, f32[G]. num_loss_tokens: i64[S]. Rewards and loss
    tokens are the same on every rank. penalties: the KL penalties that are subtracted from the
    rewards; None if the KL is not part of the reward. values, values_after: the critic's values of
    the states before and after each loss token, f32[N] per micro-batch on the last pipeline stage;
    None without a critic. values_after is used only with `bootstrap_truncated`.
    """
    if not credits_tokens(algorithm, config, penalties is not None):
        samples = compare_rewards(rewards, num_loss_tokens, algorithm, config, penalties)
        return Advantages(with_advantages(batches, samples), samples, {})
    num_samples = sum(len(group) for group in rewards)
    if config.bootstrap_truncated and values_after:  # empty on earlier pipeline stages
        batches = [
            dataclasses.replace(b, bootstrap=gae.bootstrap(after, to_device(b, after.device)))
            for b, after in zip(batches, values_after, strict=True)
        ]
    if values is not None:
        return _credited(batches, values, penalties, algorithm, config, num_samples, mesh)
    zeros = [torch.zeros_like(b.old_logprobs) for b in batches if b.old_logprobs is not None]
    found = _credited(batches, zeros, penalties, algorithm, config, num_samples, mesh)
    return dataclasses.replace(found, metrics={})


def credits_tokens(algorithm: Algorithm, config: AlgorithmConfig, kl_in_reward: bool) -> bool:
    """Return whether each token gets its own advantage, instead of one advantage per sequence."""
    if traits(algorithm).needs_critic or config.turn_rewards:
        return True
    return kl_in_reward and hasattr(algorithm, "token_advantages")


def with_advantages(batches: Sequence[MicroBatch], samples: Tensor) -> list[MicroBatch]:
    """Return the micro-batches with the advantages of their samples. Padding gets 0.

    samples: f32[S], the advantage of each sample of the step.
    """
    filled = []
    for batch in batches:
        ids = batch.sample_ids
        assert ids is not None
        own = torch.where(ids >= 0, samples[ids.clamp(min=0)], 0.0)
        filled.append(dataclasses.replace(batch, advantages=own))
    return filled


def set_advantages(groups: Sequence[SampleGroup], samples: Tensor) -> None:
    """Write the advantages of the step's samples, f32[S], into the groups."""
    sizes = [len(group.samples) for group in groups]
    for group, own in zip(groups, samples.split(sizes), strict=True):
        group.advantages = own


def compare_rewards(
    rewards: Sequence[Tensor],
    num_loss_tokens: Tensor,
    algorithm: Algorithm,
    config: AlgorithmConfig,
    penalties: Penalties | None = None,
    episodes: Sequence[Sequence[int] | None] | None = None,
) -> Tensor:
    """Return f32[S]: the advantages that `algorithm` computes from the rewards of each group.

    `penalties`, if given, are first subtracted from the rewards. The result is whitened if the
    algorithm whitens and has no critic. With a critic, the result holds rewards, from
    which advantages are computed later.

    rewards: the shaped rewards of each group, f32[G]. num_loss_tokens: i64[S], for algorithms that
    whiten. episodes: `SampleGroup.episodes` of each group; the episodes of a group are compared, and
    each of their branches gets the advantage of its episode.

    A sample without a loss token has no penalty of its own, but its reward still counts in its
    group. The mean penalty of the group is subtracted from this reward, because otherwise the
    sample would look better than the other samples.
    """
    if penalties is not None:
        sizes = [len(group) for group in rewards]
        paid = penalties.samples.to(torch.float32).split(sizes)
        off = [
            torch.where(has, own, own[has].mean()) if bool(has.any()) else own
            for own, has in zip(paid, penalties.has_tokens.split(sizes), strict=True)
        ]
        rewards = [r - p for r, p in zip(rewards, off, strict=True)]
    of = episodes or [None] * len(rewards)
    compared = [of_episodes(own, each) for own, each in zip(rewards, of, strict=True)]
    found = algorithm.advantages(compared, config)
    _check_shapes(found, compared, config)
    samples = torch.cat([of_samples(own, each) for own, each in zip(found, of, strict=True)])
    whitens, has_values = traits(algorithm).whitens, traits(algorithm).needs_critic
    if not whitens or has_values:  # with a critic these are rewards, not yet advantages
        return samples
    return _whitened(samples, num_loss_tokens, algorithm, config)


def _check_shapes(found: object, rewards: Sequence[Tensor], config: AlgorithmConfig) -> None:
    """Raise InputError unless `found` holds one tensor for each group, of the shape of its rewards."""
    listed = isinstance(found, (list, tuple))
    got = [getattr(each, "shape", None) for each in found] if listed else []
    if got != [each.shape for each in rewards]:
        first = f" whose first element is {_kind(found[0])}" if listed and found else ""
        what = f"a {type(found).__name__} of {len(found)}{first}" if listed else _kind(found)
        raise InputError(
            f"algorithm.name {config.name!r}: advantages() returned {what}; return a list with one "
            f"tensor for each of the {len(rewards)} groups, of the shape of its rewards, "
            f"{list(rewards[0].shape)}"
        )


def _kind(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _whitened(
    samples: Tensor, num_loss_tokens: Tensor, algorithm: Algorithm, config: AlgorithmConfig
) -> Tensor:
    """Return f32[S]: `(A - mean) / std`, with mean and std over the loss tokens of the step.

    Each loss token has the advantage A of its sample. The result is 0 for samples without a loss
    token. If all samples with loss tokens have equal advantages, the result is exactly 0 for all
    samples.
    """
    counts, values = num_loss_tokens.double(), samples.double()
    known = values[counts > 0]
    if not len(known) or bool((known == known[0]).all()):
        return torch.zeros_like(samples)
    mean = float((counts * values).sum() / counts.sum())
    std = float((counts * (values - mean).square()).sum() / counts.sum()) ** 0.5
    white = (values - mean) / _spread(std, algorithm, config)
    return torch.where(counts > 0, white, 0.0).float()


def _credited(
    batches: Sequence[MicroBatch],
    values: Sequence[Tensor],
    penalties: Penalties | None,
    algorithm: Algorithm,
    config: AlgorithmConfig,
    num_samples: int,
    mesh: Mesh,
) -> Advantages:
    """Return the micro-batches with token advantages, returns and the critic's old values. A
    collective.

    values: f32[N] per micro-batch on the last pipeline stage; an empty list on the other stages,
    where the micro-batches only get the advantages of their samples.
    """
    usual = gae.token_advantages if traits(algorithm).needs_critic else gae.monte_carlo
    compute = getattr(algorithm, "token_advantages", usual)
    results: list[tuple[Tensor, Tensor]] = []
    for number, own in enumerate(values):
        batch = to_device(batches[number], own.device)
        off = None if penalties is None else penalties.tokens[number]
        results.append(compute(own, batch.rewards, off, batch, config))
    columns = [
        _moments(advantages, returns, own)
        for (advantages, returns), own in zip(results, values, strict=True)
    ]
    sums = sample_sums(columns, batches, num_samples, mesh)
    total = [math.fsum(column) for column in sums.T.tolist()]
    means = sums[:, 1] / sums[:, 0].clamp(min=1)
    if or_default(config.whiten, traits(algorithm).whitens):
        mean, std = gae.mean_and_std(torch.tensor(total[:3], dtype=torch.float64))
        spread = _spread(std, algorithm, config)
        results = [(gae.whiten(a, mean, spread), returns) for a, returns in results]
        means = torch.where(sums[:, 0] > 0, (means - mean) / spread, 0.0)
    samples = means.float()
    filled = with_advantages(batches, samples)
    for number, ((advantages, returns), own) in enumerate(zip(results, values, strict=True)):
        filled[number] = dataclasses.replace(
            filled[number], token_advantages=advantages, returns=returns, old_values=own
        )
    return Advantages(filled, samples, _value_metrics(total))


def _spread(std: float, algorithm: Algorithm, config: AlgorithmConfig) -> float:
    """Return the divisor for whitening: the std plus a small constant.

    If the algorithm reads `min_group_std` and `advantage_eps`, a std below `min_group_std` is first
    raised to `min_group_std`, and `advantage_eps` is the constant.
    """
    if set(SPREAD_KEYS) <= (traits(algorithm).reads or set()):
        return max(std, config.min_group_std) + config.advantage_eps
    return std + gae.WHITEN_EPS


def _moments(advantages: Tensor, returns: Tensor, values: Tensor) -> Tensor:
    """Return f64[N, 7]: the columns 1, A, A^2, R, R^2, R - V, (R - V)^2 for each token.

    A are the advantages, R the returns and V the values, f32[N] each.
    """
    a, r, v = advantages.double(), returns.double(), values.double()
    error = r - v
    return torch.stack(
        [torch.ones_like(a), a, a.square(), r, r.square(), error, error.square()], dim=1
    )


def _value_metrics(total: Sequence[float]) -> dict[str, float]:
    """Return the metrics `value/*`.

    total: the sums of the columns of `_moments` over all loss tokens. The explained variance is
    1 - Var(R - V) / Var(R); it is NaN if all returns are equal.
    """
    count = max(total[0], 1.0)
    _, advantage, _, mean, square, bias, error = (value / count for value in total)
    spread, left = square - mean * mean, error - bias * bias
    return {
        "value/advantage_mean": advantage,
        "value/return_mean": mean,
        "value/explained_variance": 1.0 - left / spread if spread > 1e-12 else math.nan,
    }
