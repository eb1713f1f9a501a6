"""The plain PyTorch code that the kernels are held against, as frameworks write it.

B sequences padded to T tokens, N rows of logits, V vocabulary. Taken from the manner of verl's
core_algos.py and TRL's grpo_trainer.py: [B, T] tensors, a float mask that is multiplied in, a
masked sum for every statistic, log-softmax in fp32. What they would compute twice is computed once
here, and nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Padded(NamedTuple):
    """A padded batch holds the inputs of the loss but the log-probs of the current policy."""

    old: Tensor  # f32[B, T], as the next three
    mask: Tensor  # 1 on loss tokens
    rollout: Tensor | None
    ref: Tensor | None
    advantages: Tensor  # f32[B, 1]
    seq_weight: Tensor  # f32[B]


class LossSettings(NamedTuple):
    ratio: str
    clip: str
    low: float = 0.0
    high: float = 0.0
    tau_positive: float = 1.0
    tau_negative: float = 1.0
    truncate: float | None = None
    """Upper end of the truncated importance weight old / rollout, per token."""
    kl_coef: float = 0.0
    """The coefficient of k3 to the reference."""


# In the order in which `policy_loss` stacks them; the names of csrc/policy_loss.h.
STATS = (
    "num_tokens",
    "ratio_sum",
    "ratio_count",
    "ratio_max",
    "clip_high_count",
    "clip_low_count",
    "k1_sum",
    "k3_sum",
)
KL_STATS = ("ref_kl_sum",)
WEIGHT_STATS = (
    "weight_sum",
    "weight_sq_sum",
    "weight_count",
    "truncated_count",
    "mismatch_abs_sum",
    "mismatch_abs_max",
)


def stat_names(settings: LossSettings) -> tuple[str, ...]:
    names = STATS
    names += KL_STATS if settings.kl_coef else ()
    return names + (WEIGHT_STATS if settings.truncate is not None else ())


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum()


def policy_loss(logprobs: Tensor, batch: Padded, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Return the loss and the statistics of `stat_names`. logprobs: [B, T], the dtype of `batch`."""
    old, mask, rollout, ref, advantages, seq_weight = batch
    log_ratio = logprobs - old
    lengths = mask.sum(-1, keepdim=True).clamp(min=1.0)
    weights = seq_weight[:, None]
    if settings.ratio == "sequence":
        mean = (log_ratio * mask).sum(-1, keepdim=True) / lengths
        if settings.truncate is not None:
            # With a weight per token: GSPO-token (arXiv 2507.18071 eq. 14), as in verl.
            mean = logprobs - logprobs.detach() + mean.detach()
        ratio, counted = mean.exp(), lengths.clamp(max=1.0)
        weights = weights / lengths
    else:
        ratio, counted = log_ratio.exp(), mask

    low, high = 1.0 - settings.low, 1.0 + settings.high
    if settings.clip == "cispo":
        objective = ratio.clamp(low, high).detach() * advantages * logprobs
    elif settings.clip == "sapo":
        tau = torch.where(advantages > 0, settings.tau_positive, settings.tau_negative)
        objective = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau * advantages
    else:
        objective = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)

    token_loss = -objective
    raw = weight = kl = None
    if rollout is not None and settings.truncate is not None:
        with torch.no_grad():
            raw = torch.exp(old - rollout)
            weight = raw.clamp(max=settings.truncate)
        token_loss = token_loss * weight
    if ref is not None and settings.kl_coef:
        gap = ref - logprobs
        kl = torch.exp(gap) - gap - 1.0
        token_loss = token_loss + settings.kl_coef * kl
    loss = ((token_loss * mask) * weights).sum()

    with torch.no_grad():
        stats = ratio_stats(log_ratio, ratio, counted, batch, settings)
        if kl is not None:
            stats.append(masked_sum(kl, mask))
        if rollout is not None and settings.truncate is not None and raw is not None:
            assert weight is not None
            mismatch = (old - rollout).abs()
            stats += [
                masked_sum(weight, mask),
                masked_sum(weight * weight, mask),
                mask.sum(),
                masked_sum(raw > settings.truncate, mask),
                masked_sum(mismatch, mask),
                (mismatch * mask).max(),
            ]
        return loss, torch.stack(stats)


def ratio_stats(
    log_ratio: Tensor, ratio: Tensor, counted: Tensor, batch: Padded, settings: LossSettings
) -> list[Tensor]:
    """Return the statistics of STATS. log_ratio: [B, T]; ratio and counted: [B, T] or [B, 1]."""
    mask, advantages = batch.mask, batch.advantages
    per_sequence = ratio[:, :1] if settings.ratio == "sequence" else ratio
    over, under = per_sequence > 1.0 + settings.high, per_sequence < 1.0 - settings.low
    if settings.clip == "ppo":
        over, under = over & (advantages > 0), under & (advantages < 0)
    if settings.clip == "sapo":
        over, under = torch.zeros_like(over), torch.zeros_like(under)
    return [
        mask.sum(),
        masked_sum(per_sequence, counted),
        counted.sum(),
        (per_sequence * counted).max(),
        masked_sum(over, counted),
        masked_sum(under, counted),
        -masked_sum(log_ratio, mask),
        masked_sum(torch.exp(log_ratio) - log_ratio - 1.0, mask),
    ]


def logprob(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of `labels` and entropy, f32[N] each. logits [N, V], any dtype; i64[N]."""
    logits = logits.float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, labels[:, None]).squeeze(-1)
    probs = torch.softmax(logits, dim=-1)
    entropy = torch.logsumexp(logits, dim=-1) - (probs * logits).sum(-1)
    return logprobs, entropy


def seq_logratio(logprobs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Return f32[B, 2]: sum and count over the loss tokens of each sequence. All inputs are [B, T]."""
    return torch.stack([((logprobs - old) * mask).sum(-1), mask.sum(-1)], dim=-1)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, f32[B, T]: verl's loop over time, masked tokens passed over."""
    next_value: Tensor | float = 0.0
    advantage: Tensor | float = 0.0
    backwards = []
    for t in reversed(range(rewards.shape[1])):
        kept = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        here = delta + gamma * lam * advantage
        next_value = values[:, t] * kept + (1 - kept) * next_value
        advantage = here * kept + (1 - kept) * advantage
        backwards.append(advantage)
    advantages = torch.stack(backwards[::-1], dim=1)
    return advantages * mask, (advantages + values) * mask
