"""CISPO (MiniMax-M1, arXiv 2506.13585): the objective of a token is `A log p` times the clipped
ratio, which is treated as a constant.

Unlike in PPO, a token whose ratio is clipped still has a gradient. By default the ratio is bounded
above only. The paper does not give the bound. The default is 5 (`clip_high` 4), as in arXiv
2510.13786 and in TRL.
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

READS = ("clip_low", "clip_high", *SPREAD_KEYS)
CLIP_LOW = 1.0
CLIP_HIGH = 4.0

advantages = group_normalised
sequence_weights = weights_by("token_mean")


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute CISPO's objective (eq. 4 and 5) as a loss: negated, and weighted by
    `batch.seq_weight`. Raises ValueError if `batch.old_logprobs` is None."""
    low, high = or_default(config.clip_low, CLIP_LOW), or_default(config.clip_high, CLIP_HIGH)
    return ratio_loss(logprobs, batch, config, ratio="token", clip=Clip("cispo", low, high))
