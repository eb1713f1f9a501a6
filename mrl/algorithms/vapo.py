"""VAPO (arXiv 2504.05118) is PPO with a critic for long chains of thought.

Length-adaptive lambda for the policy and 1 for the critic (decoupled GAE), clip-higher, a mean over all
tokens, and the log-likelihood of samples that were right beside the policy loss. Its warm-up of the
critic and its groups of samples are the loop's.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from mrl.algorithms import gae, ppo
from mrl.algorithms.advantages import raw_rewards
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.base import either
from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, Mean, MicroBatch

NEEDS_CRITIC = True
READS = (*ppo.READS, "nll_coef")
CLIP_LOW = 0.2  # section 5.1
CLIP_HIGH = 0.28
NLL_COEF = 0.1

advantages = raw_rewards
sequence_weights = weights_by("token_mean")
token_advantages = partial(
    gae.token_advantages, published=gae.Lambdas(policy="adaptive", critic=1.0)
)


def nll_weights(num_loss_tokens: Tensor, rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return f32[S]: nll_coef / (tokens of all samples with a reward above 0) on these, else 0."""
    right = (rewards > 0) & (num_loss_tokens > 0)
    total = torch.where(right, num_loss_tokens, 0).sum().clamp(min=1)
    return torch.where(right, either(config.nll_coef, NLL_COEF) / total.double(), 0.0).float()


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Return eq. 12: PPO's loss + nll_coef * mean of -logp over the tokens of right samples (eq. 11).

    Raises ValueError without `old_logprobs`, `token_advantages` or `nll_weight`.
    """
    if batch.nll_weight is None:
        raise ValueError("MicroBatch.nll_weight: got None, expected f32[B] of `nll_weights`")
    output = ppo.critic_policy_loss(logprobs, batch, config, CLIP_LOW, CLIP_HIGH)
    lengths = batch.cu_seqlens.diff().long()
    weights = batch.nll_weight.double().repeat_interleave(lengths, output_size=logprobs.numel())
    used = batch.loss_mask & (weights > 0)
    logp = torch.where(used, logprobs, 0.0).double()
    nll = Mean(-logp.detach().sum(), used.sum().double())
    return dataclasses.replace(
        output,
        loss_sum=output.loss_sum - (weights * logp).sum(),
        stats={**output.stats, "nll/positive": nll},
    )
