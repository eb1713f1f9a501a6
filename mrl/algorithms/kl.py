"""KL(policy || reference) as a term of the loss or of the reward, and the adaptive KL coefficient.

The KL of a token is estimated from `d`, the reference log-prob minus the policy log-prob (Schulman,
"Approximating KL divergence", 2020): `k1 = -d`, `k2 = d^2 / 2`, `k3 = exp(d) - 1 - d`.

Dimensions: N packed tokens, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.aggregation import token_weights
from mrl.config import AlgorithmConfig
from mrl.kernels import KlPenalty, RatioKind
from mrl.types import MicroBatch


def kl_penalty(config: AlgorithmConfig) -> KlPenalty | None:
    """Return the KL penalty that `mrl.kernels.policy_loss` adds to the loss. Return None if there is
    no KL, if the KL is part of the reward, or if `unbiased_kl` computes it instead."""
    if not config.kl_coef or config.kl_in == "reward" or config.kl_estimator == "k3_unbiased":
        return None
    return KlPenalty(config.kl_estimator, config.kl_coef)


def uses_unbiased(config: AlgorithmConfig) -> bool:
    return config.kl_coef > 0 and config.kl_in == "loss" and config.kl_estimator == "k3_unbiased"


def unbiased_kl(
    logprobs: Tensor, old: Tensor, batch: MicroBatch, ratio: RatioKind
) -> tuple[Tensor, Tensor]:
    """Return two f64[] sums of the KL estimates of the loss tokens: first the KL term of the loss,
    with gradient, then the unweighted sum, without gradient.

    The KL estimate of a token is `r * k3`. Here `r` is the ratio of the token's probabilities under
    the current and the old policy; the gradient also passes through `r`. For tokens sampled from
    the old policy, the expectation of the estimate is the KL, and the expectation of its gradient
    is the gradient of the KL (DeepSeek-V3.2, arXiv 2512.02556). In the KL term, each estimate is
    multiplied by the weight of its token (see `token_weights`), but not by `kl_coef`.

    logprobs, old: f32[N], the log-probs of the current and the old policy. Raises ValueError if
    `batch.ref_logprobs` is None.
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
    """Return f32[N]: `kl_coef` times the KL estimate of each loss token, to be subtracted from the
    token's reward; 0 at other tokens (InstructGPT, arXiv 2203.02155 eq. 2, which uses k1).

    old: f32[N], the policy's log-probs before the update, without gradient. Raises ValueError if
    `batch.ref_logprobs` is None, or if the estimator is not k1, k2 or k3: the other estimators
    differ from k1, k2 and k3 only in the gradient, and a reward has no gradient.
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
    """Return the KL coefficient of the next step (arXiv 1909.08593 section 2.2). If
    `config.kl_target` is None, this is `coef`.

    The result is `coef * (1 + e * min(num_samples / kl_horizon, 1))`, where `e` is
    `measured / kl_target - 1`, clamped to [-0.2, 0.2]. The coefficient thus changes by at most 20%.

    coef: the coefficient of this step. measured: the mean KL per token in this step. num_samples:
    the number of samples of this step.
    """
    if config.kl_target is None:
        return coef
    error = min(max(measured / config.kl_target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * min(num_samples / config.kl_horizon, 1.0))
