"""Supervised next-token loss: what SFT trains with before the first rollout.

It has the shape of an algorithm so that the same trainer runs it. It reads no rewards, so it has
no advantages: asked for them, as the algorithm of an RL run would be, it refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.algorithms.aggregation import weights_by
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.types import LossOutput, MicroBatch

READS = ()

sequence_weights = weights_by("token_mean")


def advantages(rewards: Sequence[Tensor], config: AlgorithmConfig) -> list[Tensor]:
    """Raises InputError: zeros would let an RL run train on its own samples, good and bad."""
    raise InputError(
        "algorithm.name: got 'nll', the supervised loss of SFT, which has no advantages; "
        "expected an RL algorithm such as gspo or grpo"
    )


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Sum over loss tokens of -seq_weight * logp, f64[]; reads no old log-probs.

    Where tokens have weights of their own, these are `token_advantages`, and count as factors.
    """
    lengths = batch.cu_seqlens.diff().long()
    weights = batch.seq_weight.double().repeat_interleave(lengths, output_size=logprobs.numel())
    if batch.token_advantages is not None:
        weights = weights * batch.token_advantages.double()
    return LossOutput(torch.where(batch.loss_mask, -weights * logprobs.double(), 0.0).sum())
