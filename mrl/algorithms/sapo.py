"""SAPO (arXiv 2511.20347) has a sigmoid gate around ratio 1 in the place of a clip.

Tokens far from the old policy fade out smoothly, those with a negative advantage a little sooner.
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

READS = ("tau_positive", "tau_negative", *SPREAD_KEYS)
TAU_POSITIVE = 1.0
TAU_NEGATIVE = 1.05

advantages = group_normalised
sequence_weights = weights_by("seq_mean_token_mean")


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute eq. 5 and 6, negated and weighted. Raises ValueError without `old_logprobs`."""
    clip = Clip(
        "sapo",
        tau_positive=either(config.tau_positive, TAU_POSITIVE),
        tau_negative=either(config.tau_negative, TAU_NEGATIVE),
    )
    return ratio_loss(logprobs, batch, config, ratio="token", clip=clip)
