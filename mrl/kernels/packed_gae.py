"""`mrl::packed_gae`: generalised advantage estimation over packed sequences.

Dimensions: N packed tokens, B packed sequences; sequence i is tokens
[cu_seqlens[i], cu_seqlens[i+1]).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import backend


def packed_gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the advantages f32[N], and the returns f32[N], which are advantages + values.

    Both results are 0 at masked tokens. The recursion (arXiv 1506.02438 eq. 16) runs over the loss
    tokens of each sequence, from the last to the first:

        A_t = r_t + gamma V' - V_t + gamma lam A'

    A' and V' are the advantage and the value of the next loss token, or 0 at the last loss token.

    Masked tokens (prompt, tool output) are skipped: their values, even NaN, do not affect the
    result. The computation is in fp64, and its bits do not depend on threads, packing or the split
    into micro-batches.

    Args:
        rewards: f32[N], without gradient.
        values: f32[N], without gradient.
        loss_mask: bool[N] or u8[N], true for the loss tokens.
        cu_seqlens: i32[B+1], non-decreasing from 0 to N.
        gamma: the discount factor, in [0, 1].
        lam: the lambda of GAE, in [0, 1]; or f32[B], one per sequence, e.g. VAPO's length-adaptive
            lambda (arXiv 2504.05118).

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value, or requires grad. On GPUs
            bad values in `cu_seqlens` or in a `lam` tensor abort the kernel with a message instead.
    """
    seq_lam = lam if isinstance(lam, Tensor) else None
    backend.check_constant(rewards=rewards, values=values, lam=seq_lam)
    one_lam = 1.0 if isinstance(lam, Tensor) else float(lam)
    return torch.ops.mrl.packed_gae(
        rewards, values, loss_mask, cu_seqlens, seq_lam, float(gamma), one_lam
    )


def _check(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    seq_lam: Tensor | None,
    gamma: float,
    lam: float,
) -> None:
    n, b = backend.check_packed(rewards, loss_mask, cu_seqlens, "rewards")
    legend, fp32 = f"N = {n} tokens, B = {b} sequences", (torch.float32,)
    backend.check_tensor("values", values, (n,), fp32, rewards.device, legend)
    if seq_lam is not None:
        backend.check_tensor("lam", seq_lam, (b,), fp32, rewards.device, legend)
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: got {value}, expected between 0 and 1")


torch.library.define(
    "mrl::packed_gae",
    "(Tensor rewards, Tensor values, Tensor loss_mask, Tensor cu_seqlens, Tensor? seq_lam, "
    "float gamma, float lam) -> (Tensor advantages, Tensor returns)",
)


@torch.library.impl("mrl::packed_gae", ("cpu", "cuda"))
def _packed_gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    seq_lam: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    _check(rewards, values, loss_mask, cu_seqlens, seq_lam, gamma, lam)
    inputs = {
        "rewards": rewards.contiguous(),
        "values": values.contiguous(),
        "loss_mask": loss_mask.contiguous(),
        "cu_seqlens": cu_seqlens.contiguous(),
        "seq_lam": None if seq_lam is None else seq_lam.contiguous(),
    }
    advantages = torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device)
    returns = torch.empty_like(advantages)
    backend.run(
        "packed_gae",
        rewards.device,
        **inputs,
        num_tokens=rewards.numel(),
        num_sequences=cu_seqlens.numel() - 1,
        gamma=gamma,
        lam=lam,
        advantages=advantages,
        returns=returns,
    )
    return advantages, returns


@torch.library.register_fake("mrl::packed_gae")
def _packed_gae_fake(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    seq_lam: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    _check(rewards, values, loss_mask, cu_seqlens, seq_lam, gamma, lam)
    return rewards.new_empty(rewards.shape), rewards.new_empty(rewards.shape)
