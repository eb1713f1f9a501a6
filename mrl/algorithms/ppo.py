"""PPO: the clipped policy loss with a critic (arXiv 1707.06347; for language models 2203.02155).

Token advantages are computed by GAE and normalised over all loss tokens of the step. The critic's
loss is `value_loss.critic_loss`.
"""

from __future__ import annotations

from torch import Tensor

from mrl.algorithms.advantages import raw_rewards
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.ratio_loss import PPO_CLIP_KEYS, ppo_clip, ratio_loss
from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, MicroBatch

NEEDS_CRITIC = True
WHITENS = True
READS = (
    *PPO_CLIP_KEYS,
    "gamma",
    "lam",
    "lam_alpha",
    "lam_critic",
    "whiten",
    "value_clip",
    "bootstrap_truncated",
    "turn_rewards",
)
CLIP_LOW = 0.2
CLIP_HIGH = 0.2

advantages = raw_rewards
sequence_weights = weights_by("token_mean")


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute PPO's objective (eq. 7) as a loss: negated, and weighted by `batch.seq_weight`.

    Raises ValueError if `batch.old_logprobs` or `batch.token_advantages` is None.
    """
    return critic_policy_loss(logprobs, batch, config, CLIP_LOW, CLIP_HIGH)


def critic_policy_loss(
    logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig, low: float, high: float
) -> LossOutput:
    """Compute PPO's loss. If the recipe does not set the clip range, it is 1 - `low` to 1 + `high`.

    Raises ValueError if `batch.old_logprobs` or `batch.token_advantages` is None.
    """
    if batch.token_advantages is None:
        raise ValueError(
            "MicroBatch.token_advantages: got None, expected f32[N], computed from the critic's values"
        )
    clip = ppo_clip(config, low, high)
    return ratio_loss(logprobs, batch, config, ratio="token", clip=clip)
