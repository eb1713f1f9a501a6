"""GSPO (arXiv 2507.18071) has one importance ratio per sequence, the length-normalised one.

Its clip range is narrow, because a mean of log-ratios moves little. `old_logprobs` must be the
trainer's own: against the engine's, the numerical gap alone would use up the range.
"""

from __future__ import annotations

from torch import Tensor

from mrl.algorithms.advantages import SPREAD_KEYS, group_normalised
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.ratio_loss import PPO_CLIP_KEYS, ppo_clip, ratio_loss
from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, MicroBatch

RATIO = "sequence"
READS = (*PPO_CLIP_KEYS, *SPREAD_KEYS)
CLIP_LOW = 3e-4  # section 5.1
CLIP_HIGH = 4e-4

advantages = group_normalised
sequence_weights = weights_by("seq_mean_token_mean", ratio="sequence")


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute eq. 5, negated and weighted.

    Raises ValueError without `old_logprobs`, and with token advantages: a sequence has one here.
    """
    if batch.token_advantages is not None:
        raise ValueError(
            "MicroBatch.token_advantages: got a tensor, but gspo has one a sequence; "
            "expected gspo_token"
        )
    return sequence_loss(logprobs, batch, config)


def sequence_loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """GSPO's loss with GSPO's clip range, of whatever advantages there are."""
    clip = ppo_clip(config, CLIP_LOW, CLIP_HIGH)
    return ratio_loss(logprobs, batch, config, ratio="sequence", clip=clip)
