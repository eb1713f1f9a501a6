"""The loss of the critic: the squared difference between its values and the returns. A clip can
limit how far each value moves from what it was before the update.

Dimensions: N packed tokens and B sequences of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, Mean, MicroBatch


def critic_loss(values: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute `value_loss` for a micro-batch, with the clip range `config.value_clip`.

    values: f32[N] with gradient, the critic's current values. Raises ValueError if
    `batch.old_values` or `batch.returns` is None.
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

    `V_clipped` is `V` clamped to within `clip` of the value before the update, which limits how far
    the updates on one rollout move a value (PPO, arXiv 1707.06347 eq. 9, clipped as in TRL and
    verl). If `clip` is None, `V` is not clipped.

    values: f32[N] with gradient. old_values: f32[N], the values before the update. returns: f32[N].
    loss_mask: bool[N]. cu_seqlens: i32[B+1]. seq_weight: f32[B], already divided by the global
    normaliser.

    Tokens outside of `loss_mask` do not contribute, even if their values are NaN. Statistics:
    `value/mean`; `value/squared_error`, the mean of `(V - R)^2`; and `value/clip_frac`, the share of
    loss tokens for which the clipped term is the larger one.
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
