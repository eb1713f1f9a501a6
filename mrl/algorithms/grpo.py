"""GRPO (arXiv 2402.03300): rewards normalised within each group, and PPO's clipped loss with one
importance ratio per token. The KL term is off by default."""

from __future__ import annotations

from torch import Tensor

from mrl.algorithms.advantages import SPREAD_KEYS, group_normalised
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.ratio_loss import PPO_CLIP_KEYS, ppo_clip, ratio_loss
from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, MicroBatch

READS = (*PPO_CLIP_KEYS, *SPREAD_KEYS)
CLIP_LOW = 0.2
CLIP_HIGH = 0.2

advantages = group_normalised
sequence_weights = weights_by("seq_mean_token_mean")


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute GRPO's objective (eq. 3, with beta = `kl_coef`) as a loss: negated, and weighted by
    `batch.seq_weight`.

    Raises ValueError if `batch.old_logprobs` is None.
    """
    clip = ppo_clip(config, CLIP_LOW, CLIP_HIGH)
    return ratio_loss(logprobs, batch, config, ratio="token", clip=clip)
