"""The critic's loss: the squared error to the returns, clipped around the values before the update.

This is not an algorithm; it trains the critic of algorithms that have one.

Dimensions: N packed tokens of a micro-batch, B its sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, Mean, MicroBatch


def critic_loss(values: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute the `value_loss` of a micro-batch. Every loss token has the weight `batch.seq_weight`
    of its sequence.

    values: f32[N] with gradient. Raises ValueError if `batch.old_values` or `batch.returns` is
    None.
    """
    if batch.old_values is None or batch.returns is None:
        raise ValueError(
            "MicroBatch.old_values, returns: got None, expected f32[N] from the critic"
        )
    return value_loss(
        values,
        batch.old_values,
        batch.returns,
        batch.loss_mask,
        batch.cu_seqlens,
        batch.seq_weight,
        clip=config.value_clip,
    )


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    seq_weight: Tensor,
    *,
    clip: float | None,
) -> LossOutput:
    """Return the sum of `seq_weight * max((V - R)^2, (V_clipped - R)^2) / 2` over the loss tokens,
    in f64, where `V` is the value and `R` the return of a token.

    `V_clipped` is `V` clamped to within `clip` of the old value, so that one rollout cannot move
    the value further (PPO, arXiv 1707.06347 eq. 9, clipped as in TRL and verl). If `clip` is None,
    `V` is not clipped.

    values: f32[N] with gradient. old_values, returns: f32[N]. loss_mask: bool[N]. cu_seqlens:
    i32[B+1]. seq_weight: f32[B], already divided by the global normaliser.

    Tokens outside `loss_mask` do not contribute, even if they are NaN. Statistics: `value/mean`,
    `value/squared_error`, and `value/clip_frac`, the share of loss tokens whose clipped term is the
    larger one.
    """
    lengths = cu_seqlens.diff().long()
    weights = seq_weight.double().repeat_interleave(lengths, output_size=values.numel())
    v, old, target = (
        torch.where(loss_mask, t, 0.0).double() for t in (values, old_values, returns)
    )
    error = (v - target).square()
    worst = error
    if clip is not None:
        clipped = old + (v - old).clamp(-clip, clip)
        worst = error.maximum((clipped - target).square())
    loss = (0.5 * torch.where(loss_mask, weights, 0.0) * worst).sum()
    count = loss_mask.sum().double()
    return LossOutput(
        loss,
        {
            "value/mean": Mean(v.detach().sum(), count),
            "value/squared_error": Mean(error.detach().sum(), count),
            "value/clip_frac": Mean((worst > error).sum().double(), count),
        },
    )
