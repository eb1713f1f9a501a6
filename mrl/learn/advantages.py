"""Compute the advantages of a step from its scored groups: the only place that does.

The stage subtracts the penalty of overlong answers from the rewards, then the KL (`algorithm.kl_in:
reward`). It then compares the rewards of a group, or credits each token by GAE over a critic's values,
and whitens over the loss tokens of the step where the algorithm does. Everything is computed over the
whole step and all ranks before it is normalised, so no split of the step into micro-batches or over
ranks changes a bit of it.

The rewards of a group stay as they were scored, for metrics and rollouts.
G samples of a group, S samples of the step, N packed tokens of a micro-batch, B its sequences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.provenance import without_stale_tokens
from mrl.algorithms import gae
from mrl.algorithms.advantages import SPREAD_KEYS, raw_rewards
from mrl.algorithms.base import Algorithm, either, traits
from mrl.algorithms.dapo import overlong_penalty
from mrl.algorithms.signal import has_signal
from mrl.config import AlgorithmConfig
from mrl.learn.kl_control import Penalties
from mrl.types import MicroBatch, Sample, SampleGroup
from parallel.mesh import Mesh
from parallel.packing import to_device
from parallel.sample_sums import sample_sums

TRUNCATED = "length"
"""The finish reason of an answer that was cut off."""


@dataclass(frozen=True)
class Advantages:
    """This is the result of the stage on one rank."""

    batches: list[MicroBatch]
    """This rank's micro-batches with the advantages that they train with."""
    samples: Tensor
    """f32[S], the same on every rank: the advantage of each sample. Where tokens have advantages of
    their own it is the mean over the sample's loss tokens, 0 without one."""
    metrics: dict[str, float]
    """`value/*` over all ranks; empty without a critic."""


def compute_advantages(
    batches: Sequence[MicroBatch],
    rewards: Sequence[Tensor],
    loss_tokens: Tensor,
    algorithm: Algorithm,
    config: AlgorithmConfig,
    mesh: Mesh,
    *,
    penalties: Penalties | None = None,
    values: Sequence[Tensor] | None = None,
    values_after: Sequence[Tensor] | None = None,
) -> Advantages:
    """Compute what a step trains with. A collective where `credits_tokens`.

    rewards: shaped, f32[G] of every group of the step. loss_tokens: i64[S] of `count_loss_tokens`. Both
    are the same on every rank. penalties: of the KL in the reward, None without it. values,
    values_after: the critic's of the states before and after each loss token, f32[N] a micro-batch on
    the last pipeline stage, where there is a critic; the latter count under `bootstrap_truncated`.
    """
    if not credits_tokens(algorithm, config, penalties is not None):
        samples = _compared(rewards, loss_tokens, penalties, algorithm, config)
        return Advantages(with_advantages(batches, samples), samples, {})
    num_samples = sum(len(group) for group in rewards)
    if config.bootstrap_truncated and values_after:  # none on the earlier pipeline stages
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
    """Return whether each token has an advantage of its own; otherwise its sequence has one."""
    if traits(algorithm).needs_critic or config.turn_rewards:
        return True
    return kl_in_reward and hasattr(algorithm, "token_advantages")


def with_advantages(batches: Sequence[MicroBatch], samples: Tensor) -> list[MicroBatch]:
    """Return the micro-batches with the advantages f32[S] of their samples, 0 for padding."""
    filled = []
    for batch in batches:
        ids = batch.sample_ids
        assert ids is not None
        own = torch.where(ids >= 0, samples[ids.clamp(min=0)], 0.0)
        filled.append(dataclasses.replace(batch, advantages=own))
    return filled


def set_advantages(groups: Sequence[SampleGroup], samples: Tensor) -> None:
    """Write the advantages f32[S] of the step's samples into their groups."""
    sizes = [len(group.samples) for group in groups]
    for group, own in zip(groups, samples.split(sizes), strict=True):
        group.advantages = own


def set_reward_advantages(
    groups: Sequence[SampleGroup],
    loss_tokens: Tensor,
    algorithm: Algorithm,
    config: AlgorithmConfig,
    max_response_len: int,
) -> None:
    """Write the advantages of the shaped rewards into the groups: for a step that is not trained."""
    rewards = [shaped_rewards(group, config, max_response_len) for group in groups]
    set_advantages(groups, _compared(rewards, loss_tokens, None, algorithm, config))


def _compared(
    rewards: Sequence[Tensor],
    loss_tokens: Tensor,
    penalties: Penalties | None,
    algorithm: Algorithm,
    config: AlgorithmConfig,
) -> Tensor:
    """f32[S]: advantages by `algorithm.advantages` of the rewards less their penalties, whitened where
    the algorithm does.

    A sample outside the loss, whose reward still counts, is charged its group's mean penalty: without
    one it would look better than the others.
    """
    if penalties is not None:
        sizes = [len(group) for group in rewards]
        paid = penalties.samples.to(torch.float32).split(sizes)
        off = [
            torch.where(has, own, own[has].mean()) if bool(has.any()) else own
            for own, has in zip(paid, penalties.has_tokens.split(sizes), strict=True)
        ]
        rewards = [r - p for r, p in zip(rewards, off, strict=True)]
    samples = torch.cat(algorithm.advantages(rewards, config))
    whitens, has_values = traits(algorithm).whitens, traits(algorithm).needs_critic
    if not whitens or has_values:  # rewards, where values are still subtracted from them
        return samples
    return _whitened(samples, loss_tokens, algorithm, config)


def _whitened(
    samples: Tensor, loss_tokens: Tensor, algorithm: Algorithm, config: AlgorithmConfig
) -> Tensor:
    """f32[S]: (A - mean) / std, both over the loss tokens of the step, each with its sample's A.

    0 for samples without a loss token, and exactly 0 where those of all others are equal.
    """
    counts, values = loss_tokens.double(), samples.double()
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
    """Token advantages, returns and old values where this rank has `values`, and `value/*`."""
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
    if either(config.whiten, traits(algorithm).whitens):
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
    """What whitening divides by."""
    if set(SPREAD_KEYS) <= (traits(algorithm).reads or set()):
        return max(std, config.min_group_std) + config.advantage_eps
    return std + gae.WHITEN_EPS


def _moments(advantages: Tensor, returns: Tensor, values: Tensor) -> Tensor:
    """f64[N, 7]: 1, A, A^2, R, R^2, R - V, (R - V)^2."""
    a, r, v = advantages.double(), returns.double(), values.double()
    error = r - v
    return torch.stack(
        [torch.ones_like(a), a, a.square(), r, r.square(), error, error.square()], dim=1
    )


def _value_metrics(total: Sequence[float]) -> dict[str, float]:
    """Explained variance is 1 - Var(R - V) / Var(R), NaN where all returns are equal."""
    count = max(total[0], 1.0)
    _, advantage, _, mean, square, bias, error = (value / count for value in total)
    spread, left = square - mean * mean, error - bias * bias
    return {
        "value/advantage_mean": advantage,
        "value/return_mean": mean,
        "value/explained_variance": 1.0 - left / spread if spread > 1e-12 else math.nan,
    }


def shaped_rewards(group: SampleGroup, config: AlgorithmConfig, max_response_len: int) -> Tensor:
    """Return f32[G]: rewards less the soft penalty of long answers (DAPO, arXiv 2503.14476 eq. 13)."""
    assert group.rewards is not None
    if not config.overlong_buffer_len:
        return group.rewards
    lengths = torch.tensor([sample.num_generated for sample in group.samples])
    return group.rewards + overlong_penalty(lengths, max_response_len, config.overlong_buffer_len)


def known_rewards(rewards: Sequence[Tensor], config: AlgorithmConfig) -> list[list[float]]:
    """Return shaped rewards f32[G] of every group as numbers, 0 where a sample has none.

    Raises ValueError on an infinite reward.
    """
    return [own.tolist() for own in raw_rewards(rewards, config)]


def outside_loss(group: SampleGroup, config: AlgorithmConfig) -> list[bool]:
    """Return which samples teach nothing: those without a reward; those cut off, under
    `overlong_filter`; those of a zero-variance group, under `dynamic_sampling`, which draws others."""
    assert group.rewards is not None
    flat = config.dynamic_sampling and not has_signal(group.rewards)
    return [
        flat or unscored or (config.overlong_filter and sample.finish_reason == TRUNCATED)
        for sample, unscored in zip(group.samples, group.rewards.isnan().tolist(), strict=True)
    ]


def without_loss(sample: Sample) -> Sample:
    """Return the sample with no token in the loss."""
    return dataclasses.replace(sample, loss_mask=torch.zeros_like(sample.loss_mask))


def drop_from_loss(groups: Sequence[SampleGroup], config: AlgorithmConfig) -> list[SampleGroup]:
    """Return the groups with their samples `outside_loss` masked; the groups given stay whole."""
    return [
        dataclasses.replace(
            group,
            samples=[
                without_loss(sample) if outside else sample
                for sample, outside in zip(group.samples, outside_loss(group, config), strict=True)
            ],
        )
        for group in groups
    ]


def count_loss_tokens(
    groups: Sequence[SampleGroup], config: AlgorithmConfig, *, drops_stale: bool
) -> Tensor:
    """Return i64[S]: how many tokens of each sample of the step are trained on, on all ranks alike.

    `drops_stale`: tokens leave the loss whose routes other weights chose (r3 replay).
    """
    samples = [sample for group in drop_from_loss(groups, config) for sample in group.samples]
    if drops_stale:
        samples = [without_stale_tokens(sample) for sample in samples]
    return torch.stack([sample.loss_mask.sum() for sample in samples])


def shaping_metrics(
    groups: Sequence[SampleGroup], config: AlgorithmConfig, max_response_len: int
) -> dict[str, float]:
    """Return the mean penalty over scored samples, and how many answers were cut off and so left the
    loss; each only where the recipe turns it on."""
    metrics: dict[str, float] = {}
    if config.overlong_buffer_len:
        pairs = [(shaped_rewards(g, config, max_response_len), g.rewards) for g in groups]
        off = torch.cat([raw - shaped for shaped, raw in pairs if raw is not None])
        metrics["reward/overlong_penalty"] = float(off.double().nanmean())
    if config.overlong_filter:
        cut = [sample.finish_reason == TRUNCATED for group in groups for sample in group.samples]
        metrics["reward/overlong_filtered"] = float(sum(cut))
    return metrics
