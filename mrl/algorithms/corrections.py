"""What makes up for tokens that another distribution sampled: weights, and masks that compose.

`old` are the trainer's log-probs that the ratio is against (`old_logprobs`, or a proximal policy's),
`rollout` the engine's, `logp` the current ones. The weight is the kernel's; a mask sets the advantage
of its tokens to 0, which is the same as a detached factor 0 on the objective, because that is
positively homogeneous in A, and is safe where the ratio is infinite.

Dimensions: N packed tokens, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms.base import either
from mrl.config import AlgorithmConfig, MaskConfig
from mrl.kernels import ImportanceWeight, seq_logratio
from mrl.types import Mean, MicroBatch, Statistics

IMPORTANCE_RANGES = {
    ("tis", "token"): (0.0, 2.0),
    ("tis", "sequence"): (0.0, 2.0),
    ("mis", "token"): (0.5, 5.0),
    ("mis", "sequence"): (0.999, 1.002),
}
"""The usual ones: see `mrl.kernels.ImportanceWeight`. `mis` of tokens is IcePop with its range."""

MASK_RANGES = {
    "token_mask": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
    "dppo": (0.15, 0.15),
}
"""The usual ones: those of the `mis` weights, and binary-TV DPPO's in verl's recipe."""


def importance_weight(config: AlgorithmConfig) -> ImportanceWeight | None:
    """What corrects for the distribution that the tokens were sampled from; None where nothing does.

    Raises ValueError where the range is empty.
    """
    kind, level = config.importance, config.importance_level
    if kind == "none":
        return None
    low, high = IMPORTANCE_RANGES[kind, level]
    return ImportanceWeight(
        kind, level, either(config.importance_low, low), either(config.importance_high, high)
    )


@dataclass(frozen=True)
class _Given:
    """What the masks look at; everything f32[N], without gradient."""

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor

    def sequence_means(self, a: Tensor, b: Tensor) -> Tensor:
        """f64[N]: the mean of a - b over the loss tokens of each token's sequence; 0 without one."""
        total, count = seq_logratio(a, b, self.loss_mask, self.cu_seqlens).unbind(1)
        means = torch.where(count > 0, total / count, 0.0)
        return means.repeat_interleave(self.cu_seqlens.diff().long(), output_size=a.numel())


def masked_advantages(
    logprobs: Tensor, old: Tensor, batch: MicroBatch, config: AlgorithmConfig
) -> tuple[Tensor, Statistics]:
    """f32[N]: each token's advantage, 0 where any of `config.masks` takes it out.

    With `mask/NAME`, the share of loss tokens that each mask takes out alone.
    """
    advantages = token_advantages(batch)
    given = _Given(
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
        out = _taken_out(mask, given) & batch.loss_mask
        stats[f"mask/{mask.name}"] = Mean(out.sum().double(), count)
        advantages = torch.where(out, 0.0, advantages)
    return advantages, stats


def token_advantages(batch: MicroBatch) -> Tensor:
    """Return f32[N]: `batch.token_advantages`, or each sequence's advantage on all of its tokens."""
    if batch.token_advantages is not None:
        return batch.token_advantages
    lengths = batch.cu_seqlens.diff().long()
    return sequence_advantages(batch).repeat_interleave(lengths, output_size=batch.num_tokens)


def sequence_advantages(batch: MicroBatch) -> Tensor:
    """Return the batch's `advantages` f32[B]; raise ValueError where they are None."""
    if batch.advantages is None:
        raise ValueError(
            "MicroBatch.advantages: got None, expected f32[B], those of mrl.learn.advantages"
        )
    return batch.advantages


def mask_range(mask: MaskConfig) -> tuple[float, float]:
    """(low, high) as configured or published; raises ValueError for `opsm` without `high`."""
    if mask.name == "opsm":
        if mask.high is None:
            raise ValueError("opsm: got no high, expected one: no value of it is published")
        return 0.0, mask.high
    low, high = MASK_RANGES[mask.name]
    return either(mask.low, low), either(mask.high, high)


def _taken_out(mask: MaskConfig, given: _Given) -> Tensor:
    """bool[N]. NaN is nowhere outside a range: it stays in, and the loss says so."""
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
