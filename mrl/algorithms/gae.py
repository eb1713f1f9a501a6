"""Token advantages, and returns for the critic, by GAE (`mrl.kernels.packed_gae`).

Each loss token of a sequence is one time step of GAE. Dimensions: N packed tokens and B sequences
of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mrl.algorithms.base import or_default
from mrl.config import AlgorithmConfig
from mrl.kernels import packed_gae
from mrl.types import MicroBatch


@dataclass(frozen=True)
class Lambdas:
    """The published lambdas of an algorithm, which the recipe's `lam` and `lam_critic` override.

    If `policy` equals `critic`, as in PPO, the algorithm has a single lambda: a number in `lam` then
    also overrides `critic`, unless the recipe sets `lam_critic`.
    """

    policy: float | Literal["adaptive"]
    critic: float


PPO = Lambdas(policy=0.95, critic=0.95)
MONTE_CARLO = Lambdas(policy=1.0, critic=1.0)
WHITEN_EPS = 1e-8
"""The constant that whitening adds to the standard deviation. For algorithms that read `min_group_std`
and `advantage_eps`, `advantage_eps` is added instead."""


def token_advantages(
    values: Tensor,
    sequence_rewards: Tensor,
    token_penalties: Tensor | None,
    batch: MicroBatch,
    config: AlgorithmConfig,
    *,
    published: Lambdas = PPO,
) -> tuple[Tensor, Tensor]:
    """Return advantages f32[N] and returns f32[N]; both are 0 at tokens that are not loss tokens.

    values: f32[N], the critic's values. If all values are 0 and lambda is 1, the advantage of a
    token is the discounted sum of the rewards from this token to the end of its sequence.
    sequence_rewards: f32[B], the reward of each sequence, which its last loss token gets. Not used
    if `batch.token_rewards` is given.
    token_penalties: f32[N], subtracted from the reward of each loss token; None subtracts nothing.
    published: the lambdas that apply if the recipe sets none.

    The value after the last loss token T is `batch.bootstrap`, or 0 if that is None, so the last
    advantage is `A_T = r_T + gamma * bootstrap - V_T`. The advantages use the policy's lambda, and
    the returns use the critic's lambda (decoupled GAE, arXiv 2503.01491).
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

    lam = or_default(config.lam, published.policy)
    one = published.policy == published.critic and lam != "adaptive"
    lam_critic = or_default(config.lam_critic, float(lam) if one else published.critic)
    if lam == "adaptive":
        advantages, _ = gae(adaptive_lambda(mask, cu_seqlens, config.lam_alpha))
        return advantages, gae(lam_critic)[1]
    advantages, returns = gae(float(lam))
    return advantages, returns if lam == lam_critic else gae(lam_critic)[1]


monte_carlo = partial(token_advantages, published=MONTE_CARLO)
"""`token_advantages` with lambda 1, for algorithms without a critic. Pass zeros as `values`."""


def bootstrap(values_after: Tensor, batch: MicroBatch) -> Tensor:
    """Return f32[B]: the critic's value after the last loss token of each truncated sequence; 0 for
    other sequences, and for sequences without a loss token.

    values_after: f32[N], the critic's value of the state after each loss token. Raises ValueError
    if `batch.truncated` is None.
    """
    if batch.truncated is None:
        raise ValueError("MicroBatch.truncated: got None, expected bool[B]")
    last = _last_loss_tokens(batch.loss_mask, batch.cu_seqlens)
    return torch.where(batch.truncated & (last >= 0), values_after[last.clamp(min=0)], 0.0)


def adaptive_lambda(loss_mask: Tensor, cu_seqlens: Tensor, alpha: float) -> Tensor:
    """Return f32[B]: the lambda of each sequence, `1 - 1 / (alpha * l)` but at least 0, where `l` is
    the number of loss tokens of the sequence (VAPO, arXiv 2504.05118 eq. 9)."""
    running = torch.nn.functional.pad(loss_mask.long().cumsum(0), (1, 0))
    tokens = running[cu_seqlens.long()].diff().double()
    return (1.0 - 1.0 / (alpha * tokens).clamp(min=1.0)).float()


def _at_last_loss_token(sequence_rewards: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return f32[N]: the reward of each sequence at its last loss token, 0 elsewhere. Rewards of
    sequences without a loss token are dropped."""
    last = _last_loss_tokens(mask, cu_seqlens)
    earned = torch.where(last >= 0, sequence_rewards, 0.0)
    return sequence_rewards.new_zeros(mask.numel()).index_add(0, last.clamp(min=0), earned)


def _last_loss_tokens(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return i64[B]: the packed index of each sequence's last loss token; -1 if it has none."""
    num_tokens, device = mask.numel(), mask.device
    lengths = cu_seqlens.diff().long()
    sequences = torch.arange(len(lengths), device=device)
    sequences = sequences.repeat_interleave(lengths, output_size=num_tokens)
    places = torch.where(mask, torch.arange(num_tokens, device=device), -1)
    return torch.full_like(lengths, -1).scatter_reduce(0, sequences, places, "amax")


def mean_and_std(total: Tensor) -> tuple[float, float]:
    """Return the mean and the population std of a quantity.

    total: f64[3], the number of values, their sum, and the sum of their squares. Returns (0, 0) if
    there are no values.
    """
    count, first, second = total.tolist()
    mean = first / max(count, 1.0)
    return mean, max(second / max(count, 1.0) - mean * mean, 0.0) ** 0.5


def whiten(advantages: Tensor, mean: float, spread: float) -> Tensor:
    """Return f32[N]: `(advantages - mean) / spread`, computed in f64.

    mean: the mean of the advantages over all loss tokens of the step. spread: their std plus a small
    constant.
    """
    return ((advantages.double() - mean) / spread).float()
