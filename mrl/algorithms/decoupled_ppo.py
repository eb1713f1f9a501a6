"""Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298) is for tokens of older weights.

The clip is around the proximal policy, the trainer's from before the update, recomputed
(`old_logprobs`); what was sampled from is corrected apart, by the detached weight exp(old - rollout).
"""

from __future__ import annotations

from torch import Tensor

from mrl.algorithms.advantages import SPREAD_KEYS, raw_rewards
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.corrections import importance_weight
from mrl.algorithms.ratio_loss import PPO_CLIP_KEYS, ppo_clip, ratio_loss
from mrl.config import AlgorithmConfig
from mrl.kernels import ImportanceWeight
from mrl.types import LossOutput, MicroBatch

CORRECTS_ROLLOUT = True
WHITENS = True
READS = (*PPO_CLIP_KEYS, *SPREAD_KEYS)
CLIP_LOW = 0.2
CLIP_HIGH = 0.2
WEIGHT = ImportanceWeight("mis", "token", 0.0, 5.0)
"""AReaL's cap: a token whose weight is above it leaves the loss. `algorithm.importance` replaces it."""

advantages = raw_rewards
sequence_weights = weights_by("token_mean")


def loss(
    logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig, proximal: Tensor | None = None
) -> LossOutput:
    """Compute eq. 5 of AReaL, negated and weighted; `proximal` f32[N] in the place of `old_logprobs`.

    Raises ValueError without either.
    """
    return ratio_loss(
        logprobs,
        batch,
        config,
        ratio="token",
        clip=ppo_clip(config, CLIP_LOW, CLIP_HIGH),
        old=proximal,
        importance=importance_weight(config) or WEIGHT,
    )
