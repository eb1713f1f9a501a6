"""GRPO (arXiv 2402.03300): one importance ratio per token. Its KL term is off by default."""

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

CLIP_LOW = 0.2
CLIP_HIGH = 0.2

advantages = group_advantages


def sequence_weights(
    num_loss_tokens: Tensor, num_loss_tokens_total: int, num_samples_total: int
) -> Tensor:
    """Token mean per sequence, then mean over samples: 1/(|y| * num_samples_total), f32[S]."""
    return weight_where_loss(num_loss_tokens, num_loss_tokens * num_samples_total)


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Eq. 3 with beta = kl_coef, negated and weighted. Raises ValueError without `old_logprobs`."""
    return clipped_loss(
        logprobs,
        batch,
        ratio="token",
        clip_low=either(config.clip_low, CLIP_LOW),
        clip_high=either(config.clip_high, CLIP_HIGH),
        kl=kl_penalty(config),
        importance=importance_weight(config),
    )
