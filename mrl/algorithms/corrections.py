"""Importance weights and masks for tokens that another distribution sampled.

Names of log-probs: `old` are the trainer's log-probs in the denominator of the ratio
(`old_logprobs`, or the log-probs of a proximal policy), `rollout` are the engine's log-probs, and
`logp` the current policy's log-probs.

The kernel applies the weights. A mask sets the advantages `A` of its tokens to 0. This equals
multiplying the objective by a detached 0, because the objective is positively homogeneous in `A`,
and it is safe if the ratio is infinite.

Dimensions: N packed tokens, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms.base import or_default
from mrl.config import AlgorithmConfig, MaskConfig
from mrl.kernels import ImportanceWeight, seq_logratio
from mrl.types import Mean, MicroBatch, Statistics

IMPORTANCE_RANGES = {
    ("tis", "token"): (0.0, 2.0),
    ("tis", "sequence"): (0.0, 2.0),
    ("mis", "token"): (0.5, 5.0),
    ("mis", "sequence"): (0.999, 1.002),
}
"""The default range (low, high) for each kind and level of importance weight; see
`mrl.kernels.ImportanceWeight`. Token-level `mis` with this range is IcePop."""

MASK_RANGES = {
    "token_mask": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
    "dppo": (0.15, 0.15),
}
"""The default (low, high) of each mask except `opsm`, which has no default. `token_mask` and
`sequence_mask` have the ranges of the `mis` weights. For `dppo`, low and high bound how far a
token's probability may decrease and increase; the values are from verl's recipe for binary-TV DPPO."""


def importance_weight(config: AlgorithmConfig) -> ImportanceWeight | None:
    """Return the recipe's importance weight, `exp(old log-prob - rollout log-prob)` with a range,
    or None if `config.importance` is `none`.

    Raises ValueError if the range is empty.
    """
    kind, level = config.importance, config.importance_level
    if kind == "none":
        return None
    low, high = IMPORTANCE_RANGES[kind, level]
    return ImportanceWeight(
        kind,
        level,
        or_default(config.importance_low, low),
        or_default(config.importance_high, high),
    )


@dataclass(frozen=True)
class _MaskInputs:
    """Inputs of the masks: four tensors f32[N] without gradient, the loss mask bool[N] and the
    sequence boundaries i32[B+1]."""

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor

    def sequence_means(self, a: Tensor, b: Tensor) -> Tensor:
        """Return f64[N]: the mean of `a - b` over the loss tokens of each token's sequence; 0 if
        the sequence has no loss token."""
        total, count = seq_logratio(a, b, self.loss_mask, self.cu_seqlens).unbind(1)
        means = torch.where(count > 0, total / count, 0.0)
        return means.repeat_interleave(self.cu_seqlens.diff().long(), output_size=a.numel())


def masked_advantages(
    logprobs: Tensor, old: Tensor, batch: MicroBatch, config: AlgorithmConfig
) -> tuple[Tensor, Statistics]:
    """Return f32[N]: each token's advantage, set to 0 if any of `config.masks` masks the token.

    The statistics contain `mask/NAME` for each mask: the share of loss tokens that this mask masks,
    even if other masks mask the same tokens.
    """
    advantages = token_advantages(batch)
    given = _MaskInputs(
        logprobs.detach(),
        old,
        batch.rollout_logprobs,
        advantages,
        batch.loss_mask,
        batch.cu_seqlens,
    )
    count = batch.loss_mask.sum().double()
    stats: Statistics = {}
    for mask in config.masks:
        out = _is_masked(mask, given) & batch.loss_mask
        stats[f"mask/{mask.name}"] = Mean(out.sum().double(), count)
        advantages = torch.where(out, 0.0, advantages)
    return advantages, stats


def token_advantages(batch: MicroBatch) -> Tensor:
    """Return f32[N]: `batch.token_advantages`, or each sequence's advantage at all of its tokens."""
    if batch.token_advantages is not None:
        return batch.token_advantages
    lengths = batch.cu_seqlens.diff().long()
    return sequence_advantages(batch).repeat_interleave(lengths, output_size=batch.num_tokens)


def sequence_advantages(batch: MicroBatch) -> Tensor:
    """Return the batch's `advantages` f32[B]. Raises ValueError if they are None."""
    if batch.advantages is None:
        raise ValueError(
            "MicroBatch.advantages: got None, expected f32[B], as computed by mrl.learn.advantages"
        )
    return batch.advantages


def mask_range(mask: MaskConfig) -> tuple[float, float]:
    """Return the mask's (low, high): the configured values, or else the defaults in `MASK_RANGES`.

    For `opsm`, low is 0. Raises ValueError for `opsm` without `high`, which has no default.
    """
    if mask.name == "opsm":
        if mask.high is None:
            raise ValueError("opsm: got no high, expected a value; none is published")
        return 0.0, mask.high
    low, high = MASK_RANGES[mask.name]
    return or_default(mask.low, low), or_default(mask.high, high)


def _is_masked(mask: MaskConfig, given: _MaskInputs) -> Tensor:
    """Return bool[N]: whether `mask` masks each token.

    A comparison with NaN is false, so a token with a NaN log-prob is not masked. It makes the loss
    NaN, which is reported.
    """
    low, high = mask_range(mask)
    if mask.name == "token_mask":
        return _outside((given.old - given.rollout).double().exp(), low, high)
    if mask.name == "sequence_mask":
        return _outside(given.sequence_means(given.old, given.rollout).exp(), low, high)
    if mask.name == "opsm":
        gap = given.sequence_means(given.rollout, given.logprobs)
        return (given.advantages < 0) & (gap > high)
    moved = given.logprobs.double().exp() - given.rollout.double().exp()
    up, down = given.advantages > 0, given.advantages < 0
    return (up & (moved > high)) | (down & (moved < -low))


def _outside(values: Tensor, low: float, high: float) -> Tensor:
    return (values < low) | (values > high)
