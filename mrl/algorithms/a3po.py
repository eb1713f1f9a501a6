"""A-3PO (arXiv 2512.06547; AReaL): decoupled PPO that approximates the proximal policy.

It needs no forward pass for the proximal policy. Instead it interpolates the log-prob of a token
between the policy that sampled the token and the current policy. The older the version that sampled
the token, the closer the result is to the current policy. Dimension: N packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms import decoupled_ppo
from mrl.algorithms.aggregation import weights_by
from mrl.config import AlgorithmConfig
from mrl.types import UNKNOWN_VERSION, LossOutput, MicroBatch

NEEDS_OLD_LOGPROBS = False
CORRECTS_ROLLOUT = True
WHITENS = True
READS = (*decoupled_ppo.READS, "proximal_at_no_lag")
CLIP_LOW, CLIP_HIGH = decoupled_ppo.CLIP_LOW, decoupled_ppo.CLIP_HIGH

advantages = decoupled_ppo.advantages
sequence_weights = weights_by("token_mean")


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute `decoupled_ppo.loss` with `proximal_logprobs` as the log-probs of the proximal policy.
    `batch.old_logprobs` is not read.

    Raises ValueError if `batch.version` or `batch.weight_versions` is None.
    """
    proximal = proximal_logprobs(logprobs.detach(), batch, config)
    return decoupled_ppo.loss(logprobs, batch, config, proximal)


def proximal_logprobs(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """Return the approximate log-probs f32[N] of the proximal policy,
    `rollout_logprobs + alpha * (logprobs - rollout_logprobs)`.

    `alpha` is `(d - 1) / d` for a token that is d versions old: the proximal policy is one version
    behind the current policy, so it has made d - 1 of the d updates since the token was sampled.
    For d = 1 it is the policy that sampled the token. For d = 0, `config.proximal_at_no_lag` sets
    `alpha` to 0, as in AReaL's code, or to 1, as in the paper. For tokens of unknown version
    `alpha` is 0. The result is 0 outside of the loss mask.

    logprobs: f32[N], the current policy's log-probs. Raises ValueError if `batch.version` or
    `batch.weight_versions` is None.
    """
    if batch.version is None or batch.weight_versions is None:
        raise ValueError(
            "MicroBatch.version, weight_versions: got None, expected those of the rollout"
        )
    staleness = (batch.version - batch.weight_versions).double()
    known = batch.loss_mask & (batch.weight_versions != UNKNOWN_VERSION)
    alpha = torch.where(known, 1.0 - 1.0 / staleness.clamp(min=1), 0.0)
    if config.proximal_at_no_lag == "policy":
        alpha = torch.where(known & (staleness < 1), 1.0, alpha)
    rollout = torch.where(batch.loss_mask, batch.rollout_logprobs, 0.0).double()
    now = torch.where(batch.loss_mask, logprobs, 0.0).double()
    return (rollout + alpha * (now - rollout)).float()
