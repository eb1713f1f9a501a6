"""Token advantages and a critic's returns from its values, by GAE over `mrl.kernels.packed_gae`.

Steps are the loss tokens of a sequence. Dimensions: N packed tokens of a micro-batch, B its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mrl.algorithms.base import either
from mrl.config import AlgorithmConfig
from mrl.kernels import packed_gae
from mrl.types import MicroBatch


@dataclass(frozen=True)
class Lambdas:
    """An algorithm's published lambdas, where the recipe gives none. Where both are the same number
    the critic's follows the recipe's `lam`: PPO has one lambda."""

    policy: float | Literal["adaptive"]
    critic: float


PPO = Lambdas(policy=0.95, critic=0.95)
MONTE_CARLO = Lambdas(policy=1.0, critic=1.0)
WHITEN_EPS = 1e-8
"""Added to the standard deviation, where the recipe has no say in it."""


def token_advantages(
    values: Tensor,
    sequence_rewards: Tensor,
    token_penalties: Tensor | None,
    batch: MicroBatch,
    config: AlgorithmConfig,
    *,
    published: Lambdas = PPO,
) -> tuple[Tensor, Tensor]:
    """Return advantages f32[N] and returns f32[N], both 0 off the loss tokens.

    values: f32[N]; with zeros and lambda 1, each token gets the sum of the rewards from it on.
    sequence_rewards: f32[B], earned at the last loss token, unless `batch.token_rewards` say where.
    token_penalties: f32[N], subtracted from the reward of each loss token. Behind the last loss token
    the value is 0, or `batch.bootstrap`: there A_T = r_T + gamma bootstrap - V_T, which is the same as
    a reward of gamma bootstrap more. The returns use the critic's lambda, the advantages the policy's
    (decoupled GAE, arXiv 2503.01491).
    """
    mask, cu_seqlens = batch.loss_mask, batch.cu_seqlens
    rewards = batch.token_rewards
    if rewards is None:
        rewards = _at_last_loss_token(sequence_rewards, mask, cu_seqlens)
    if batch.bootstrap is not None:
        rewards = rewards + _at_last_loss_token(config.gamma * batch.bootstrap, mask, cu_seqlens)
    if token_penalties is not None:
        rewards = rewards - torch.where(mask, token_penalties, 0.0)

    def gae(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        return packed_gae(rewards, values, mask, cu_seqlens, gamma=config.gamma, lam=lam)

    lam = either(config.lam, published.policy)
    one = published.policy == published.critic and lam != "adaptive"
    lam_critic = either(config.lam_critic, float(lam) if one else published.critic)
    if lam == "adaptive":
        advantages, _ = gae(adaptive_lambda(mask, cu_seqlens, config.lam_alpha))
        return advantages, gae(lam_critic)[1]
    advantages, returns = gae(float(lam))
    return advantages, returns if lam == lam_critic else gae(lam_critic)[1]


monte_carlo = partial(token_advantages, published=MONTE_CARLO)
"""The form for algorithms without a critic, whose values are zeros."""


def bootstrap(values_after: Tensor, batch: MicroBatch) -> Tensor:
    """Return f32[B]: the value after the last loss token of each sequence that was cut off, else 0.

    values_after: f32[N], of the state after each loss token. Raises ValueError without `truncated`.
    """
    if batch.truncated is None:
        raise ValueError("MicroBatch.truncated: got None, expected bool[B]")
    last = _last_loss_tokens(batch.loss_mask, batch.cu_seqlens)
    return torch.where(batch.truncated & (last >= 0), values_after[last.clamp(min=0)], 0.0)


def adaptive_lambda(loss_mask: Tensor, cu_seqlens: Tensor, alpha: float) -> Tensor:
    """Return f32[B]: 1 - 1 / (alpha * loss tokens), at least 0 (VAPO, arXiv 2504.05118 eq. 9)."""
    running = torch.nn.functional.pad(loss_mask.long().cumsum(0), (1, 0))
    tokens = running[cu_seqlens.long()].diff().double()
    return (1.0 - 1.0 / (alpha * tokens).clamp(min=1.0)).float()


def _at_last_loss_token(sequence_rewards: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """f32[N]: each sequence's reward at its last loss token; sequences without one have nowhere."""
    last = _last_loss_tokens(mask, cu_seqlens)
    earned = torch.where(last >= 0, sequence_rewards, 0.0)
    return sequence_rewards.new_zeros(mask.numel()).index_add(0, last.clamp(min=0), earned)


def _last_loss_tokens(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """i64[B]: the packed place of each sequence's last loss token; -1 without one."""
    num_tokens, device = mask.numel(), mask.device
    lengths = cu_seqlens.diff().long()
    sequences = torch.arange(len(lengths), device=device)
    sequences = sequences.repeat_interleave(lengths, output_size=num_tokens)
    places = torch.where(mask, torch.arange(num_tokens, device=device), -1)
    return torch.full_like(lengths, -1).scatter_reduce(0, sequences, places, "amax")


def mean_and_std(total: Tensor) -> tuple[float, float]:
    """Return mean and population std from f64[3]: number, sum and sum of squares over all loss tokens.

    (0, 0) where there is no token.
    """
    count, first, second = total.tolist()
    mean = first / max(count, 1.0)
    return mean, max(second / max(count, 1.0) - mean * mean, 0.0) ** 0.5


def whiten(advantages: Tensor, mean: float, spread: float) -> Tensor:
    """Return (A - mean) / spread, f32[N], by moments over all loss tokens of the step."""
    return ((advantages.double() - mean) / spread).float()
