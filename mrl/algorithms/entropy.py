"""The entropy bonus: a term of the loss that keeps the policy from narrowing, for any algorithm.

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
    """Return the loss less entropy_coef times the entropy, which is weighed token by token as the loss.

    The entropy is that of the whole distribution at the sampling temperature, at every loss token:
    masks and importance weights leave it alone. Without a coefficient the loss comes back as it is.
    Raises ValueError without `batch.entropy`.
    """
    if not config.entropy_coef:
        return output
    if batch.entropy is None:
        raise ValueError("MicroBatch.entropy: got None, expected f32[N] of the current policy")
    ratio = "token" if traits(algorithm).sequence_range is None else "sequence"
    weights = token_weights(batch, ratio)
    bonus = torch.where(batch.loss_mask, weights * batch.entropy.double(), 0.0).sum()
    return dataclasses.replace(output, loss_sum=output.loss_sum - config.entropy_coef * bonus)
