"""The entropy bonus, a loss term that works against entropy collapse, for any algorithm.

Dimensions: N packed tokens, B sequences.
"""

from __future__ import annotations

import dataclasses

import torch

from mrl.algorithms.aggregation import token_weights
from mrl.algorithms.base import Algorithm, traits
from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, MicroBatch


def with_entropy_bonus(
    output: LossOutput, batch: MicroBatch, algorithm: Algorithm, config: AlgorithmConfig
) -> LossOutput:
    """Subtract `config.entropy_coef` times the entropy from the loss in `output`.

    The entropy is a sum over all loss tokens, in which each token has the same weight as in the
    loss. Masks and importance weights do not affect it. The entropy of a token is that of the full,
    untruncated distribution at the sampling temperature. If the coefficient is 0, `output` is
    returned unchanged; otherwise raises ValueError if `batch.entropy` is None.
    """
    if not config.entropy_coef:
        return output
    if batch.entropy is None:
        raise ValueError("MicroBatch.entropy: got None, expected f32[N] of the current policy")
    ratio = "token" if traits(algorithm).sequence_range is None else "sequence"
    weights = token_weights(batch, ratio)
    bonus = torch.where(batch.loss_mask, weights * batch.entropy.double(), 0.0).sum()
    return dataclasses.replace(output, loss_sum=output.loss_sum - config.entropy_coef * bonus)
