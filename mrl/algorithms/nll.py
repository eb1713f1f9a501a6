"""Supervised next-token loss, used for SFT before the first rollout.

It has the interface of an algorithm so that the same trainer runs it. It reads no rewards and has
no advantages, so `advantages` raises InputError in an RL run.
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
    """Raise InputError. If this function returned zeros, an RL run would train on all of its
    samples, good and bad."""
    raise InputError(
        "algorithm.name: got 'nll', the supervised loss of SFT, which has no advantages; "
        "expected an RL algorithm such as gspo or grpo"
    )


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Return the sum over the loss tokens of `-seq_weight * logprob`, f64[]. `batch.old_logprobs`
    is not read.

    If `batch.token_advantages` is given, the term of each token is also multiplied by the token's
    entry in it.
    """
    lengths = batch.cu_seqlens.diff().long()
    weights = batch.seq_weight.double().repeat_interleave(lengths, output_size=logprobs.numel())
    if batch.token_advantages is not None:
        weights = weights * batch.token_advantages.double()
    return LossOutput(torch.where(batch.loss_mask, -weights * logprobs.double(), 0.0).sum())
