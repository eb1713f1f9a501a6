"""Token advantages and the critic's returns, by GAE (`mrl.kernels.packed_gae`).

One time step of GAE is one loss token of a sequence. Dimensions: N packed tokens of a micro-batch,
B its sequences.
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
    """An algorithm's published lambdas, which apply if the recipe sets no `lam` or `lam_critic`.

    If `policy` equals `critic`, as in PPO, the algorithm has a single lambda: a number in the
    recipe's `lam` then also replaces `critic`, unless `lam_critic` is set.
    """

    policy: float | Literal["adaptive"]
    critic: float


PPO = Lambdas(policy=0.95, critic=0.95)
MONTE_CARLO = Lambdas(policy=1.0, critic=1.0)
WHITEN_EPS = 1e-8
"""Whitening divides by the standard deviation plus this constant. Algorithms that read
`min_group_std` and `advantage_eps` use `advantage_eps` instead."""


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

    values: f32[N]. If all values are 0 and lambda is 1, the advantage of a token is the discounted
    sum of the rewards from this token to the end of its sequence.
    sequence_rewards: f32[B], credited at the last loss token; `batch.token_rewards` replaces them
    if given.
    token_penalties: f32[N], subtracted from the reward of each loss token; None subtracts nothing.
    published: the lambdas that apply if the recipe sets none.

    The value after the last loss token is `batch.bootstrap`, or 0 if that is None. A bootstrap
    value gives the last advantage `A_T = r_T + gamma * bootstrap - V_T`; it is computed by adding
    `gamma * bootstrap` to the reward. The advantages use the policy's lambda and the returns use
    the critic's lambda (decoupled GAE, arXiv 2503.01491).
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
"""`token_advantages` with lambda 1, for algorithms without a critic. The caller passes zeros as
`values`."""


def bootstrap(values_after: Tensor, batch: MicroBatch) -> Tensor:
    """Return f32[B]: the value after the last loss token of each truncated sequence, else 0.

    values_after: f32[N], the value of the state after each loss token. Raises ValueError if
    `batch.truncated` is None.
    """
    if batch.truncated is None:
        raise ValueError("MicroBatch.truncated: got None, expected bool[B]")
    last = _last_loss_tokens(batch.loss_mask, batch.cu_seqlens)
    return torch.where(batch.truncated & (last >= 0), values_after[last.clamp(min=0)], 0.0)


def adaptive_lambda(loss_mask: Tensor, cu_seqlens: Tensor, alpha: float) -> Tensor:
    """Return f32[B]: `1 - 1 / (alpha * number of loss tokens)`, at least 0 (VAPO, arXiv 2504.05118
    eq. 9)."""
    running = torch.nn.functional.pad(loss_mask.long().cumsum(0), (1, 0))
    tokens = running[cu_seqlens.long()].diff().double()
    return (1.0 - 1.0 / (alpha * tokens).clamp(min=1.0)).float()


def _at_last_loss_token(sequence_rewards: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return f32[N]: each sequence's reward at its last loss token. Rewards of sequences without a
    loss token are dropped."""
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
    """Return the mean and the population std of a quantity over all loss tokens.

    `total` f64[3] holds the quantity's count, sum and sum of squares. Returns (0, 0) if the count
    is 0.
    """
    count, first, second = total.tolist()
    mean = first / max(count, 1.0)
    return mean, max(second / max(count, 1.0) - mean * mean, 0.0) ** 0.5


def whiten(advantages: Tensor, mean: float, spread: float) -> Tensor:
    """Return f32[N]: `(advantages - mean) / spread`. The mean and the spread are over all loss
    tokens of the step."""
    return ((advantages.double() - mean) / spread).float()
