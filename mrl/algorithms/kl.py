"""KL(policy || reference): in the loss, in the reward, and a coefficient that follows a target.

One sample's estimators with d = ref - logp (Schulman, "Approximating KL divergence", 2020): k1 = -d,
k2 = d^2 / 2, k3 = exp(d) - 1 - d. Dimensions: N packed tokens, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.aggregation import token_weights
from mrl.config import AlgorithmConfig
from mrl.kernels import KlPenalty, RatioKind
from mrl.types import MicroBatch


def kl_penalty(config: AlgorithmConfig) -> KlPenalty | None:
    """What the kernel adds to the loss against the frozen reference; None where it adds nothing."""
    if not config.kl_coef or config.kl_in == "reward" or config.kl_estimator == "k3_unbiased":
        return None
    return KlPenalty(config.kl_estimator, config.kl_coef)


def uses_unbiased(config: AlgorithmConfig) -> bool:
    return config.kl_coef > 0 and config.kl_in == "loss" and config.kl_estimator == "k3_unbiased"


def unbiased_kl(
    logprobs: Tensor, old: Tensor, batch: MicroBatch, ratio: RatioKind
) -> tuple[Tensor, Tensor]:
    """Sum over loss tokens of weight * r * k3 with r = exp(logp - old), f64[], and the sum of r * k3.

    DeepSeek-V3.2 (arXiv 2512.02556): with the gradient through r, too, its expectation under the old
    policy is the KL, and its gradient that of the KL. The weight is what `policy_loss` gives a token.
    """
    ref = batch.ref_logprobs
    if ref is None:
        raise ValueError("MicroBatch.ref_logprobs: got None, expected f32[N]: the KL needs it")
    mask = batch.loss_mask
    now, before, reference = (torch.where(mask, t, 0.0).double() for t in (logprobs, old, ref))
    d = reference - now
    terms = (now - before).exp() * (d.expm1() - d)
    return torch.where(mask, token_weights(batch, ratio) * terms, 0.0).sum(), terms.detach().sum()


def reward_penalties(old: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """f32[N]: kl_coef times the estimator of each loss token, to be taken off its reward; 0 elsewhere.

    Of the policy before the update, so a constant (InstructGPT, arXiv 2203.02155 eq. 2, with k1).
    Raises ValueError without `ref_logprobs`, and for an estimator that differs in its gradient only.
    """
    if batch.ref_logprobs is None:
        raise ValueError("MicroBatch.ref_logprobs: got None, expected f32[N]: the KL needs it")
    d = torch.where(batch.loss_mask, batch.ref_logprobs - old, 0.0)
    if config.kl_estimator == "k1":
        return -config.kl_coef * d
    if config.kl_estimator == "k2":
        return config.kl_coef * d.square() / 2
    if config.kl_estimator == "k3":
        return config.kl_coef * (d.expm1() - d)
    raise ValueError(
        f"kl_estimator: got {config.kl_estimator}, expected k1, k2 or k3 in the reward"
    )


def adapted_coef(coef: float, measured: float, num_samples: int, config: AlgorithmConfig) -> float:
    """Return the next step's kl_coef (arXiv 1909.08593 section 2.2), or the same without a `kl_target`.

    coef * (1 + e num_samples / kl_horizon) with e = measured / kl_target - 1 kept within 0.2, and
    num_samples within the horizon: it never reaches 0. measured: the KL a token of this step.
    """
    if config.kl_target is None:
        return coef
    error = min(max(measured / config.kl_target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * min(num_samples / config.kl_horizon, 1.0))
