"""Sequence weights, which turn the token losses of a step into one number.

A weight includes the complete global normaliser. The normaliser counts the tokens or samples of the
optimizer step on all data-parallel ranks, before the step is split into micro-batches, so the loss
does not depend on the split. A rejection mask does not change these counts; it removes tokens from
the numerator only.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from mrl.config import AlgorithmConfig
from mrl.kernels import RatioKind
from mrl.types import MicroBatch

Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]


class SequenceWeights(Protocol):
    """A function with the signature of `Algorithm.sequence_weights`."""

    def __call__(
        self,
        num_loss_tokens: Tensor,
        num_loss_tokens_total: int,
        num_samples_total: int,
        config: AlgorithmConfig,
        max_response_len: int,
    ) -> Tensor: ...


def weights_by(published: Aggregation, ratio: RatioKind = "token") -> SequenceWeights:
    """Make an `Algorithm.sequence_weights` function for `config.aggregation`, or for `published` if
    `config.aggregation` is None.

    With `ratio="sequence"` the kernel divides the weight of a sequence by its number of loss
    tokens, so here the weight is multiplied by that number. Each token then has the loss `-s A`,
    where `s` is the ratio of its sequence and `A` the advantage.
    """

    def sequence_weights(
        num_loss_tokens: Tensor,
        num_loss_tokens_total: int,
        num_samples_total: int,
        config: AlgorithmConfig,
        max_response_len: int,
    ) -> Tensor:
        """Return the weights f32[S] for the numbers of loss tokens i64[S]; 0 for a sequence without
        loss tokens."""
        kind = config.aggregation or published
        tokens = num_loss_tokens.double()
        if kind == "token_mean":
            weights = torch.full_like(tokens, 1.0 / max(num_loss_tokens_total, 1))
        else:
            weights = torch.full_like(tokens, 1.0 / max(num_samples_total, 1))
        if kind == "seq_mean_token_mean":
            weights = weights / tokens
        if kind == "seq_mean_token_sum_norm":
            weights = weights / _checked(max_response_len)
        if ratio == "sequence":
            weights = weights * tokens
        return torch.where(num_loss_tokens > 0, weights, 0.0).float()

    return sequence_weights


def token_weights(batch: MicroBatch, ratio: RatioKind) -> Tensor:
    """Return f64[N]: the weight that `mrl.kernels.policy_loss` gives each token for this kind of
    ratio."""
    lengths, mask = batch.cu_seqlens.diff().long(), batch.loss_mask
    weights = batch.seq_weight.double()
    if ratio == "sequence":
        sequences = torch.arange(len(lengths), device=mask.device).repeat_interleave(
            lengths, output_size=len(mask)
        )
        counts = weights.new_zeros(len(lengths)).index_add(0, sequences, mask.double())
        weights = weights / counts.clamp(min=1)
    return weights.repeat_interleave(lengths, output_size=len(mask))


def _checked(max_response_len: int) -> int:
    if max_response_len < 1:
        raise ValueError(
            f"max_response_len: got {max_response_len}, expected rollout.max_response_len, the "
            "constant that seq_mean_token_sum_norm divides by"
        )
    return max_response_len
