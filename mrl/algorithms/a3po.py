"""A-3PO (arXiv 2512.06547; AReaL): decoupled PPO without the pass that computes the proximal policy.

That policy is put between the one that sampled a token and the present one, in log space, the nearer to
the present one the staler the token. N packed tokens.
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
    """`decoupled_ppo.loss` around `proximal_logprobs`; `old_logprobs` are not read.

    Raises ValueError without `version` or `weight_versions`.
    """
    proximal = proximal_logprobs(logprobs.detach(), batch, config)
    return decoupled_ppo.loss(logprobs, batch, config, proximal)


def proximal_logprobs(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """Compute f32[N]: rollout + alpha (logp - rollout), alpha = (d - 1) / d for a token d versions old.

    The proximal policy is one version behind the present one, so alpha is the share of the way that it
    has gone; a token of the last version has alpha 0, the policy that sampled it. For a token of the
    present version (d = 0) alpha is 0 too, as in AReaL's code, or 1, as in the paper:
    `config.proximal_at_no_lag`.
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
