"""What an algorithm is: three pure functions in one module. And what several of them share.

Dimensions: G samples of a group, S sequences, N packed tokens of a micro-batch, B its sequences.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mrl.config import AlgorithmConfig
from mrl.kernels import Clip, ImportanceWeight, KlPenalty, RatioKind, policy_loss
from mrl.types import LossOutput, Max, Mean, MicroBatch, Statistics


class Algorithm(Protocol):
    """A module with these functions, e.g. `mrl/algorithms/gspo.py`. None of them keeps state."""

    def advantages(self, rewards: Tensor, config: AlgorithmConfig) -> Tensor:
        """f32[G] rewards of one prompt's samples to f32[G] advantages.

        NaN is an abstention: it has advantage 0 and does not count for the others. A group whose
        rewards are all equal has advantages of exactly 0.
        """
        ...

    def sequence_weights(
        self, num_loss_tokens: Tensor, num_loss_tokens_total: int, num_samples_total: int
    ) -> Tensor:
        """What each sequence counts in the loss: the whole global normaliser.

        Totals are over the optimizer step on all data-parallel ranks, and samples without a loss
        token do not count. i64[S] to f32[S]; 0 for a sequence without a loss token.
        """
        ...

    def loss(self, logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
        """f32[N] current log-probs, with gradient, to the sum over sequences: never divided.

        Any split of the step into micro-batches must add up to the same loss and gradient.
        Raises ValueError where `batch` lacks a tensor that the algorithm needs.
        """
        ...


def group_advantages(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """(R - mean) / (std + eps) over the group: f32[G] to f32[G] (arXiv 2402.03300 section 4.1.2).

    std is the sample one (divides by G - 1), as in TRL and verl. NaN rewards and groups without a
    signal as `Algorithm.advantages` says; a single scored sample has nothing to compare with: 0.

    Raises ValueError on an infinite reward.
    """
    if bool(rewards.isinf().any()):
        raise ValueError(f"rewards: got {rewards.tolist()}, expected finite numbers or NaN")
    scored = ~rewards.isnan()
    values = rewards[scored].double()
    result = torch.zeros_like(rewards, dtype=torch.float32)
    if values.numel() > 1 and bool(values.min() < values.max()):
        normalised = (values - values.mean()) / (values.std() + config.advantage_eps)
        result[scored] = normalised.float()
    return result


def weight_where_loss(num_loss_tokens: Tensor, denominator: Tensor | int) -> Tensor:
    """1 / denominator (a number or i64[S]) where a sequence has a loss token, else 0: f32[S]."""
    weights = 1.0 / torch.as_tensor(denominator, device=num_loss_tokens.device).double()
    return torch.where(num_loss_tokens > 0, weights, 0.0).float()


def kl_penalty(config: AlgorithmConfig) -> KlPenalty | None:
    """What the recipe adds against the frozen reference; None where it adds nothing."""
    return KlPenalty(config.kl_estimator, config.kl_coef) if config.kl_coef else None


IMPORTANCE_RANGES = {
    ("tis", "token"): (0.0, 2.0),
    ("tis", "sequence"): (0.0, 2.0),
    ("mis", "token"): (0.5, 5.0),
    ("mis", "sequence"): (0.999, 1.002),
}
"""The usual ones: see `mrl.kernels.ImportanceWeight`."""


def importance_weight(config: AlgorithmConfig) -> ImportanceWeight | None:
    """What corrects for the distribution that the tokens were sampled from; None where nothing does.

    Raises ValueError where the range is empty.
    """
    kind, level = config.importance, config.importance_level
    if kind == "none":
        return None
    low, high = IMPORTANCE_RANGES[kind, level]
    return ImportanceWeight(
        kind, level, either(config.importance_low, low), either(config.importance_high, high)
    )


def clipped_loss(
    logprobs: Tensor,
    batch: MicroBatch,
    *,
    ratio: RatioKind,
    clip_low: float,
    clip_high: float,
    kl: KlPenalty | None = None,
    importance: ImportanceWeight | None = None,
) -> LossOutput:
    """`mrl.kernels.policy_loss` of a micro-batch against its `old_logprobs`, with statistics.

    `kl` is against its `ref_logprobs`, weighted as the rest of the loss. `kl/ref` is the mean of its
    estimator over loss tokens. `importance` is of `old_logprobs` against `rollout_logprobs`, so each
    token is corrected for the weights that sampled it, whichever these were; `importance/mean` is of
    the weights as applied, `importance/clip_frac` the share that lay outside their range.
    Raises ValueError where log-probs that are needed are None.
    """
    if batch.old_logprobs is None:
        raise ValueError(
            "MicroBatch.old_logprobs: got None, expected f32[N], the trainer's log-probs from "
            "before the update"
        )
    result = policy_loss(
        logprobs,
        batch.old_logprobs,
        batch.loss_mask,
        batch.cu_seqlens,
        batch.advantages,
        batch.seq_weight,
        ratio=ratio,
        clip=Clip("ppo", low=clip_low, high=clip_high),
        ref_logprobs=batch.ref_logprobs if kl else None,
        kl=kl,
        rollout_logprobs=batch.rollout_logprobs if importance else None,
        importance=importance,
    )
    count = result.stat("ratio_count")
    clipped = result.stat("clip_high_count") + result.stat("clip_low_count")
    stats: Statistics = {
        "ratio/mean": Mean(result.stat("ratio_sum"), count),
        "ratio/max": Max(result.stat("ratio_max")),
        "ratio/clip_frac": Mean(clipped, count),
    }
    if kl:
        stats["kl/ref"] = Mean(result.stat("ref_kl_sum"), batch.loss_mask.count_nonzero())
    if importance:
        weights = result.stat("weight_count")
        stats["importance/mean"] = Mean(result.stat("weight_sum"), weights)
        stats["importance/clip_frac"] = Mean(result.stat("truncated_count"), weights)
    return LossOutput(result.loss, stats)


def either(configured: float | None, published: float) -> float:
    """The recipe's value, or the paper's where the recipe gives none."""
    return published if configured is None else configured
