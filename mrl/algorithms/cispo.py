"""CISPO (MiniMax-M1, arXiv 2506.13585): the clipped ratio is a constant weight of A log p.

So no token loses its gradient. Bounded above only; the paper gives no number for the bound, 5 is that
of arXiv 2510.13786 and of TRL, where it is written as the bound itself, not as 1 + clip_high.
"""

from __future__ import annotations

from torch import Tensor

from mrl.algorithms.advantages import SPREAD_KEYS, group_normalised
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.base import either
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
    """Compute eq. 4 and 5, negated and weighted. Raises ValueError without `old_logprobs`."""
    low, high = either(config.clip_low, CLIP_LOW), either(config.clip_high, CLIP_HIGH)
    return ratio_loss(logprobs, batch, config, ratio="token", clip=Clip("cispo", low, high))
