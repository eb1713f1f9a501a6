"""Token losses -> one number: the weight of each sequence carries the whole global normaliser.

Counts are those of the optimizer step over all data-parallel ranks, taken before anything is split, so
that any split adds up to the same loss. A rejection mask changes no count: what it takes out leaves the
numerator only.
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
    """The signature is that of `Algorithm.sequence_weights`."""

    def __call__(
        self,
        num_loss_tokens: Tensor,
        num_loss_tokens_total: int,
        num_samples_total: int,
        config: AlgorithmConfig,
        max_response_len: int,
    ) -> Tensor: ...


def weights_by(published: Aggregation, ratio: RatioKind = "token") -> SequenceWeights:
    """Make an `Algorithm.sequence_weights` that follows `config.aggregation`, by default the
    `published` one.

    Under ratio `sequence` the kernel divides by the sequence's tokens, which is multiplied back here:
    a sequence's loss is s A at each of its tokens.
    """

    def sequence_weights(
        num_loss_tokens: Tensor,
        num_loss_tokens_total: int,
        num_samples_total: int,
        config: AlgorithmConfig,
        max_response_len: int,
    ) -> Tensor:
        """i64[S] loss tokens of each sequence to f32[S], 0 without one."""
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
    """f64[N]: what `policy_loss` with this kind of ratio lets each token of a micro-batch count."""
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
