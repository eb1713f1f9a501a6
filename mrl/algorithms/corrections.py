"""Importance weights and masks, which correct the loss for tokens that were sampled by another
policy than the trainer's.

Three log-probs of a token are compared: `old`, in the denominator of the importance ratio
(`old_logprobs`, or the log-probs of a proximal policy); `rollout`, from the engine; and `logprobs`,
from the current policy.

`mrl.kernels.policy_loss` applies the importance weights. A mask selects tokens and sets their
advantages to 0. The policy objective of a masked token is then 0 and has no gradient, even if its
ratio is infinite.

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
"""The default range (low, high) for each kind and level of importance weight (see
`mrl.kernels.ImportanceWeight`). Token-level `mis` with its default range is IcePop."""

MASK_RANGES = {
    "token_mask": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
    "dppo": (0.15, 0.15),
}
"""The default (low, high) of each mask except `opsm`, which has no default. `token_mask` and
`sequence_mask` have the ranges of the `mis` weights. For `dppo`, low and high bound how far a
token's probability may decrease and increase; the values are from verl's recipe for binary-TV DPPO."""


def importance_weight(config: AlgorithmConfig) -> ImportanceWeight | None:
    """Return the options of the importance weight `exp(old - rollout)` that the recipe configures;
    None if `config.importance` is `none`.

    Raises ValueError if the range (low, high) of the weight is empty.
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
    """The tensors from which masks are computed: the three log-probs of each token and its
    advantage (f32[N] each, without gradient), the loss mask bool[N], and the sequence boundaries
    `cu_seqlens`, i32[B+1]."""

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor

    def sequence_means(self, a: Tensor, b: Tensor) -> Tensor:
        """Return f64[N]: for each token the mean of `a - b` over the loss tokens of its sequence; 0
        if the sequence has no loss token."""
        total, count = seq_logratio(a, b, self.loss_mask, self.cu_seqlens).unbind(1)
        means = torch.where(count > 0, total / count, 0.0)
        return means.repeat_interleave(self.cu_seqlens.diff().long(), output_size=a.numel())


def masked_advantages(
    logprobs: Tensor, old: Tensor, batch: MicroBatch, config: AlgorithmConfig
) -> tuple[Tensor, Statistics]:
    """Return the advantage of each token, f32[N], and the statistics of the masks. The advantage is
    0 for a token that any of `config.masks` masks.

    logprobs, old: f32[N], the log-probs of the current policy and those in the denominator of the
    ratio. The statistic `mask/NAME` is the share of loss tokens that the mask NAME masks, even if
    other masks mask the same tokens. Raises ValueError if `batch` has no advantages.
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
    """Return f32[N]: `batch.token_advantages`; if this is None, the advantage of each token's
    sequence (`batch.advantages`). Raises ValueError if both are None."""
    if batch.token_advantages is not None:
        return batch.token_advantages
    lengths = batch.cu_seqlens.diff().long()
    return sequence_advantages(batch).repeat_interleave(lengths, output_size=batch.num_tokens)


def sequence_advantages(batch: MicroBatch) -> Tensor:
    """Return `batch.advantages`, f32[B]. Raises ValueError if it is None."""
    if batch.advantages is None:
        raise ValueError(
            "MicroBatch.advantages: got None, expected f32[B], as computed by mrl.learn.advantages"
        )
    return batch.advantages


def mask_range(mask: MaskConfig) -> tuple[float, float]:
    """Return the bounds (low, high) of a mask: the configured values, or else the defaults in
    `MASK_RANGES`.

    For `opsm`, low is 0. Raises ValueError if `mask` is `opsm` without `high`, which has no default.
    """
    if mask.name == "opsm":
        if mask.high is None:
            raise ValueError("opsm: got no high, expected a value; none is published")
        return 0.0, mask.high
    low, high = MASK_RANGES[mask.name]
    return or_default(mask.low, low), or_default(mask.high, high)


def _is_masked(mask: MaskConfig, given: _MaskInputs) -> Tensor:
    """Return bool[N]: whether `mask` masks each token.

    A comparison with NaN is false, so a token with a NaN log-prob is not masked. The loss becomes
    NaN, so the problem does not stay hidden.
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
