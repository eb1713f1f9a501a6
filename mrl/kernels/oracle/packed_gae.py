"""Reference of `mrl::packed_gae` in fp64: the textbook loop over loss tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def packed_gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the advantages and the returns, f64[N] each (arXiv 1506.02438 eq. 16); 0 at masked tokens.

    The arguments are those of `mrl.kernels.packed_gae`. Only loss tokens are read.
    """
    advantages = torch.zeros(rewards.numel(), dtype=torch.float64)
    returns = torch.zeros_like(advantages)
    lams = torch.as_tensor(lam, dtype=torch.float64).expand(len(cu_seqlens) - 1)
    for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        seq_lam = float(lams[i])
        next_value = next_advantage = 0.0
        for t in reversed(range(start, end)):
            if loss_mask[t]:
                value = values[t].item()
                delta = rewards[t].item() + gamma * next_value - value
                next_advantage = delta + gamma * seq_lam * next_advantage
                next_value = value
                advantages[t], returns[t] = next_advantage, next_advantage + value
    return advantages, returns
