"""GSPO (arXiv 2507.18071): one importance ratio per sequence, the length-normalised one.

Its clip range is narrow, because a mean of log-ratios moves little. `old_logprobs` must be the
trainer's own: against the engine's, the numerical gap alone would use up the range.
"""

from __future__ import annotations

from torch import Tensor

from mrl.algorithms.base import (
    clipped_loss,
    either,
    group_advantages,
    importance_weight,
    kl_penalty,
    weight_where_loss,
)
from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, MicroBatch

RATIO = "sequence"
CLIP_LOW = 3e-4  # section 5.1
CLIP_HIGH = 4e-4

advantages = group_advantages


def sequence_weights(
    num_loss_tokens: Tensor, num_loss_tokens_total: int, num_samples_total: int
) -> Tensor:
    """Mean over sequences: 1/num_samples_total, f32[S]; 0 without a loss token."""
    return weight_where_loss(num_loss_tokens, num_samples_total)


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Eq. 5, negated and weighted. Raises ValueError without `old_logprobs`."""
    return clipped_loss(
        logprobs,
        batch,
        ratio="sequence",
        clip_low=either(config.clip_low, CLIP_LOW),
        clip_high=either(config.clip_high, CLIP_HIGH),
        kl=kl_penalty(config),
        importance=importance_weight(config),
    )
