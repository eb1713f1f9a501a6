"""Supervised next-token loss, used for SFT before the first rollout.

It has the interface of an algorithm, so the trainer needs no other code for SFT. It has no
advantages: `advantages` raises InputError, so an RL run with it fails.
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
    """Raise InputError, because `loss` ignores rewards: an RL run would train on all samples alike,
    good and bad."""
    raise InputError(
        "algorithm.name: got 'nll', the supervised loss of SFT, which has no advantages; "
        "expected an RL algorithm such as gspo or grpo"
    )


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Return the sum of `-seq_weight * logprob` over the loss tokens, f64[]. `batch.old_logprobs` is
    not read.

    If `batch.token_advantages` is given, each token's term is also multiplied by its token
    advantage.
    """
    lengths = batch.cu_seqlens.diff().long()
    weights = batch.seq_weight.double().repeat_interleave(lengths, output_size=logprobs.numel())
    if batch.token_advantages is not None:
        weights = weights * batch.token_advantages.double()
    return LossOutput(torch.where(batch.loss_mask, -weights * logprobs.double(), 0.0).sum())
