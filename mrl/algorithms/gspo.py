"""GSPO (arXiv 2507.18071): one length-normalised importance ratio per sequence.

The clip range is narrow, because the mean log-ratio of a sequence changes little in an update.
`old_logprobs` must therefore come from the trainer. With the engine's log-probs, the numerical
difference between engine and trainer alone would exceed the clip range.
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
    """Compute GSPO's objective (eq. 5) as a loss: negated, and weighted by `batch.seq_weight`.

    Raises ValueError if `batch.old_logprobs` is None. Also raises ValueError if the batch has token
    advantages, because GSPO uses one advantage per sequence.
    """
    if batch.token_advantages is not None:
        raise ValueError(
            "MicroBatch.token_advantages: got a tensor, but gspo has one advantage per sequence; "
            "expected gspo_token"
        )
    return sequence_loss(logprobs, batch, config)


def sequence_loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute the loss of GSPO-token if the batch has token advantages, otherwise the loss of GSPO.

    The clip range is the recipe's, by default GSPO's. Raises ValueError if `batch.old_logprobs` is
    None.
    """
    clip = ppo_clip(config, CLIP_LOW, CLIP_HIGH)
    return ratio_loss(logprobs, batch, config, ratio="sequence", clip=clip)
