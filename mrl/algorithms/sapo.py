"""SAPO (arXiv 2511.20347): a sigmoid of the importance ratio replaces PPO's clip.

The gradient of a token decays smoothly as its ratio moves away from 1, a little faster if the
advantage of the token is negative.
"""

from __future__ import annotations

from torch import Tensor

from mrl.algorithms.advantages import SPREAD_KEYS, group_normalised
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.base import or_default
from mrl.algorithms.ratio_loss import ratio_loss
from mrl.config import AlgorithmConfig
from mrl.kernels import Clip
from mrl.types import LossOutput, MicroBatch

READS = ("tau_positive", "tau_negative", *SPREAD_KEYS)
TAU_POSITIVE = 1.0
TAU_NEGATIVE = 1.05

advantages = group_normalised
sequence_weights = weights_by("seq_mean_token_mean")


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute SAPO's objective (eq. 5 and 6) as a loss: negated, and weighted by
    `batch.seq_weight`. Raises ValueError if `batch.old_logprobs` is None."""
    clip = Clip(
        "sapo",
        tau_positive=or_default(config.tau_positive, TAU_POSITIVE),
        tau_negative=or_default(config.tau_negative, TAU_NEGATIVE),
    )
    return ratio_loss(logprobs, batch, config, ratio="token", clip=clip)
