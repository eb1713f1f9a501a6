"""The policy loss of a micro-batch for all algorithms with an importance ratio, computed by the fused
kernel `mrl.kernels.policy_loss`.

Dimensions: N packed tokens and B sequences of a micro-batch.
"""

from __future__ import annotations

from torch import Tensor

from mrl.algorithms.base import or_default
from mrl.algorithms.corrections import importance_weight, masked_advantages, sequence_advantages
from mrl.algorithms.kl import kl_penalty, unbiased_kl, uses_unbiased
from mrl.algorithms.router_shift import log_router_shift_weight
from mrl.config import AlgorithmConfig
from mrl.kernels import Clip, ImportanceWeight, KlPenalty, PolicyLoss, RatioKind, policy_loss
from mrl.types import LossOutput, Max, Mean, MicroBatch, Statistics

PPO_CLIP_KEYS = ("clip_low", "clip_high", "dual_clip", "router_shift_floor")
"""Fields of AlgorithmConfig that concern a ratio that is clipped as in PPO."""


def ppo_clip(config: AlgorithmConfig, low: float, high: float) -> Clip:
    """Return PPO's clip with the recipe's options. `low` and `high` are used for `clip_low` and
    `clip_high` if the recipe does not set them."""
    return Clip(
        "ppo",
        low=or_default(config.clip_low, low),
        high=or_default(config.clip_high, high),
        dual=config.dual_clip,
    )


def ratio_loss(
    logprobs: Tensor,
    batch: MicroBatch,
    config: AlgorithmConfig,
    *,
    ratio: RatioKind,
    clip: Clip,
    old: Tensor | None = None,
    importance: ImportanceWeight | None = None,
) -> LossOutput:
    """Compute the policy loss of a micro-batch, with masks, importance weights and KL.

    logprobs: f32[N] with gradient, the current policy's log-probs.
    ratio: `token` for one ratio per token, `sequence` for one ratio per sequence.
    clip: how the ratio is bounded.
    old: f32[N], the log-probs in the denominator of the ratio; None takes `batch.old_logprobs`.
    importance: the importance weight; None takes the recipe's, if there is one. It corrects for the
    difference between `old` and `batch.rollout_logprobs`, which are the log-probs of the policy
    that sampled the tokens. That policy may be an older version.

    In the KL term, tokens have the same weights as in the rest of the loss, but masks and
    importance weights do not affect the KL term. With `config.router_shift_floor`, the ratio is that
    of the policies times the token's router-shift weight. Statistics: `ratio/...`; `mask/...`;
    `router_shift/...`; `kl/ref`, the mean KL estimate over loss tokens; `importance/mean`, the mean
    importance weight after bounding; and `importance/clip_frac`, the share of importance weights that
    were out of range.

    Raises ValueError if log-probs or advantages that are needed are None.
    """
    if old is None:
        old = _old_logprobs(batch)
    importance = importance or importance_weight(config)
    kl = kl_penalty(config)
    more_stats: Statistics = {}
    if config.masks:
        advantages, more_stats = masked_advantages(logprobs, old, batch, config)
    elif batch.token_advantages is not None:
        advantages = batch.token_advantages
    else:
        advantages = sequence_advantages(batch)
    divisor, rollout = old, batch.rollout_logprobs
    if config.router_shift_floor is not None:
        # exp(logp - (old - log w)) = ratio w, and exp((old - log w) - (rollout - log w)) is unchanged.
        shift, shift_stats = log_router_shift_weight(batch, config.router_shift_floor)
        divisor, rollout = old - shift, rollout - shift
        more_stats = more_stats | shift_stats
    result = policy_loss(
        logprobs,
        divisor,
        batch.loss_mask,
        batch.cu_seqlens,
        advantages,
        batch.seq_weight,
        ratio=ratio,
        clip=clip,
        token_advantages=bool(config.masks) or batch.token_advantages is not None,
        ref_logprobs=batch.ref_logprobs if kl else None,
        kl=kl,
        rollout_logprobs=rollout if importance else None,
        importance=importance,
    )
    loss, stats = result.loss, more_stats | _statistics(result, batch, kl, importance)
    if uses_unbiased(config):
        term, total = unbiased_kl(logprobs, old, batch, ratio)
        loss = loss + config.kl_coef * term
        stats["kl/ref"] = Mean(total, batch.loss_mask.count_nonzero())
    return LossOutput(loss, stats)


def _old_logprobs(batch: MicroBatch) -> Tensor:
    if batch.old_logprobs is None:
        raise ValueError(
            "MicroBatch.old_logprobs: got None, expected f32[N], the trainer's log-probs "
            "before the update"
        )
    return batch.old_logprobs


def _statistics(
    result: PolicyLoss,
    batch: MicroBatch,
    kl: KlPenalty | None,
    importance: ImportanceWeight | None,
) -> Statistics:
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
    return stats
