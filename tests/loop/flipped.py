"""GRPO with the sign of its loss turned: what the learning tests must not pass."""

from __future__ import annotations

from torch import Tensor

from mrl.algorithms import grpo
from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, MicroBatch

advantages = grpo.advantages
sequence_weights = grpo.sequence_weights


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    out = grpo.loss(logprobs, batch, config)
    return LossOutput(-out.loss_sum, out.stats)
