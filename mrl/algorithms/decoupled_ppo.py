"""Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298) for tokens sampled by older weights.

PPO's clipped ratio compares the current policy with the proximal policy, which is the trainer's
policy before the update (`old_logprobs`). The importance weight `exp(old_logprobs -
rollout_logprobs)`, a constant, corrects for the difference between the proximal policy and the
policy that sampled the tokens.
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
"""The default importance weight. As in AReaL, a token whose weight exceeds 5 is removed from the loss.
`algorithm.importance` replaces this default."""

advantages = raw_rewards
sequence_weights = weights_by("token_mean")


def loss(
    logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig, proximal: Tensor | None = None
) -> LossOutput:
    """Compute AReaL's objective (eq. 5) as a loss: negated, and weighted by `batch.seq_weight`.

    proximal: f32[N], the log-probs of the proximal policy; None takes `batch.old_logprobs`. Raises
    ValueError if both are None, or if `batch` has no advantages.
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
