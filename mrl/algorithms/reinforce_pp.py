"""REINFORCE++ (arXiv 2501.03262): rewards normalised over the whole step, PPO's clip, no critic.

With `kl_in: reward` (its k1 form) the penalties come off token by token first, and what is normalised
are token advantages: then `advantages` are the rewards themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from mrl.algorithms import gae, grpo
from mrl.algorithms.advantages import batch_normalised, raw_rewards
from mrl.algorithms.aggregation import weights_by
from mrl.config import AlgorithmConfig

WHITENS = True
READS = grpo.READS

sequence_weights = weights_by("token_mean")
token_advantages = partial(gae.token_advantages, published=gae.MONTE_CARLO)
loss = grpo.loss


def advantages(rewards: Sequence[Tensor], config: AlgorithmConfig) -> list[Tensor]:
    """Return f32[G] of each group."""
    if config.kl_coef and config.kl_in == "reward":
        return raw_rewards(rewards, config)
    return batch_normalised(rewards, config)
