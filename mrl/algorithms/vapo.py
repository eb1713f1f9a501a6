"""VAPO (arXiv 2504.05118): PPO with a critic for long chains of thought.

GAE uses a length-adaptive lambda for the policy and lambda 1 for the critic (decoupled GAE). The
clip range is wider above 1 than below, the loss is a mean over all tokens, and samples with a
positive reward have an additional log-likelihood term. VAPO's other two techniques are set in the
recipe: the critic's warm-up (`critic.warmup_steps`) and several samples per prompt.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from mrl.algorithms import gae, ppo
from mrl.algorithms.advantages import raw_rewards
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.base import or_default
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
    """Return f32[S]: the weight of each sample in the log-likelihood term.

    The weight is `nll_coef / n` for samples with a reward above 0 and at least one loss token, where
    `n` is the total number of loss tokens of these samples. It is 0 for other samples.

    num_loss_tokens: i64[S]. rewards: f32[S].
    """
    right = (rewards > 0) & (num_loss_tokens > 0)
    total = torch.where(right, num_loss_tokens, 0).sum().clamp(min=1)
    return torch.where(right, or_default(config.nll_coef, NLL_COEF) / total.double(), 0.0).float()


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute VAPO's objective (eq. 12) as a loss: PPO's loss plus `nll_coef` times the mean
    negative log-prob over the loss tokens of samples with a positive reward (eq. 11).

    Raises ValueError if `batch.old_logprobs`, `batch.token_advantages` or `batch.nll_weight` is
    None.
    """
    if batch.nll_weight is None:
        raise ValueError("MicroBatch.nll_weight: got None, expected f32[B] from `nll_weights`")
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
