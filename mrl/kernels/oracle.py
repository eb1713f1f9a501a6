"""fp64 references of the ops in this folder: slow, plain and differentiable by autograd.

Tests and benchmarks compare against these. They share no code with the ops.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class OracleLoss(NamedTuple):
    """As `mrl.kernels.PolicyLoss`; only `loss` has a gradient."""

    loss: Tensor
    ratio_sum: float
    ratio_count: int
    ratio_max: float
    clip_count: int


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    seq_weight: Tensor,
    *,
    ratio: str,
    clip_low: float,
    clip_high: float,
) -> OracleLoss:
    """GSPO (arXiv 2507.18071 eq. 5) or PPO/GRPO (arXiv 2402.03300 eq. 3, no KL), one by one.

    Shapes as in `mrl.kernels.policy_loss`, any float dtype; computed in fp64. Ratios are taken at
    loss tokens only, so nothing at a masked token is ever read.
    """
    loss = logprobs[:0].double().sum()  # 0, with a gradient even if no sequence counts
    seen: list[float] = []
    clip_count = 0
    bounds = cu_seqlens.tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        index = loss_mask[start:end].bool().nonzero().flatten() + start
        if not index.numel():
            continue
        logratio = logprobs[index].double() - old_logprobs[index].double()
        r = logratio.exp() if ratio == "token" else logratio.mean().exp().reshape(1)
        advantage = advantages[i].double()
        free = r * advantage
        clipped = r.clamp(1 - clip_low, 1 + clip_high) * advantage
        loss = loss - seq_weight[i].double() * torch.minimum(free, clipped).sum()
        seen += r.detach().tolist()
        clip_count += int((clipped < free).sum())
    return OracleLoss(loss, sum(seen), len(seen), max(seen, default=0.0), clip_count)
