"""Sequence weights. The loss of a step is the sum of its token losses, where each token loss is
multiplied by the weight of the token's sequence.

The weights are already divided by the global normaliser: the number of loss tokens or samples of
the optimizer step on all data-parallel ranks. The normaliser is counted before the step is split
into micro-batches, so the loss does not depend on the split. `algorithm.masks` remove tokens from
the sum, but do not change the normaliser.
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
    """Make a function `sequence_weights` for an algorithm. It uses `config.aggregation`, or
    `published` if `config.aggregation` is None.

    ratio: `token` or `sequence`, the kind of importance ratio. For `sequence`,
    `mrl.kernels.policy_loss` divides the weight of a sequence by its number of loss tokens. The
    weight is multiplied by this number here, so that `config.aggregation` has the same meaning for
    both kinds.
    """

    def sequence_weights(
        num_loss_tokens: Tensor,
        num_loss_tokens_total: int,
        num_samples_total: int,
        config: AlgorithmConfig,
        max_response_len: int,
    ) -> Tensor:
        """Return the sequence weights f32[S] as `Algorithm.sequence_weights` specifies them. Raises
        ValueError if the aggregation divides by `max_response_len` but `max_response_len` is below
        1."""
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
    """Return f64[N]: the weight by which `mrl.kernels.policy_loss` multiplies the loss of each token.

    This is the token's `batch.seq_weight`; for `ratio="sequence"` it is divided by the number of
    loss tokens of the sequence.
    """
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
