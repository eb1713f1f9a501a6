"""The critic's loss: squared error to the returns, clipped around the values before the update.

Not an algorithm by itself: it trains the critic of an algorithm with one. Dimensions: N packed tokens
of a micro-batch, B its sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, Mean, MicroBatch


def critic_loss(values: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute `value_loss` of a micro-batch, weighted as its policy loss, for `Critic.train_step`.

    values f32[N] with gradient. Raises ValueError without `old_values` or `returns`.
    """
    if batch.old_values is None or batch.returns is None:
        raise ValueError("MicroBatch.old_values, returns: got None, expected f32[N] of the critic")
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
    """Sum over loss tokens of seq_weight * max((V - R)^2, (V_clipped - R)^2) / 2, in f64.

    V_clipped is V kept within `clip` of the old value, so that one rollout cannot move it further: the
    value part of PPO (arXiv 1707.06347 eq. 9) as TRL and verl clip it. None: no clip.
    values f32[N] with gradient; old_values, returns f32[N]; loss_mask bool[N]; cu_seqlens i32[B+1];
    seq_weight f32[B], which carries the whole normaliser. Masked tokens are selected away. Reports
    `value/mean`, `value/squared_error` and `value/clip_frac`: tokens where the clipped term is larger.
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
