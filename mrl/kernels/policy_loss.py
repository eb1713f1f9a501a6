"""Clipped policy-gradient loss with its gradient in one pass, as the torch op `mrl::policy_loss`.

Dimensions: N packed tokens, B packed sequences; sequence i is tokens
[cu_seqlens[i], cu_seqlens[i+1]).

On CPUs the op is csrc/policy_loss.cpp. On GPUs it is `policy_loss_vectorized` below, plain torch
ops that stand in until the CUDA kernel of the next issue takes its place.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mrl import _C  # pyright: ignore[reportAttributeAccessIssue]

RatioKind = Literal["token", "sequence"]

_RATIOS = {"token": _C.Ratio.token, "sequence": _C.Ratio.sequence}
_NUM_STATS = 4


class PolicyLoss(NamedTuple):
    """All scalars f64: sums over micro-batches then lose nothing. Only `loss` has a gradient."""

    loss: Tensor
    """Summed over sequences, with a gradient to `logprobs`."""
    ratio_sum: Tensor
    ratio_count: Tensor
    """Sequences with a loss token under `sequence`, loss tokens under `token`."""
    ratio_max: Tensor
    """0 where nothing counts; NaN where a ratio is."""
    clip_count: Tensor
    """Ratios whose clipped branch was taken, so that they have no gradient."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    seq_weight: Tensor,
    *,
    ratio: RatioKind,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Sum over sequences i of -seq_weight_i * objective_i, with A_i the advantage.

    `token` (PPO, GRPO: arXiv 2402.03300 eq. 3 without the KL term), r_t = exp(logp_t - old_t):
        objective_i = sum over loss tokens t of min(r_t A_i, clip(r_t, 1-clip_low, 1+clip_high) A_i)
    `sequence` (GSPO: arXiv 2507.18071 eq. 5 and 7), s_i = exp(mean over loss tokens of logp - old):
        objective_i = min(s_i A_i, clip(s_i, 1-clip_low, 1+clip_high) A_i), once per sequence

    Masked tokens are selected away: NaN or inf there changes no bit of any output, and their
    gradient is 0. A sequence without a loss token contributes nothing; one whose advantage or
    weight is 0 has loss and gradient 0 however large its ratio, and counts in the statistics.
    Nothing clamps the log-ratio: a ratio past float32 under a negative advantage is an infinite
    loss. On CPUs gradients are the same bits for any threads, packing or split into micro-batches;
    the sums for any threads or packing.

    Args:
        logprobs, old_logprobs: f32[N].
        loss_mask: bool[N] or u8[N].
        cu_seqlens: i32[B+1], from 0 to N, never decreasing.
        advantages: f32[B].
        seq_weight: f32[B]; carries the whole normaliser, e.g. 1/num_samples.

    Raises:
        ValueError: names the argument, what was given and what was expected. On GPUs the values of
            `cu_seqlens` are asserted on the device instead, without waiting for it.
    """
    constants = (old_logprobs, advantages, seq_weight)
    for name, tensor in zip(("old_logprobs", "advantages", "seq_weight"), constants, strict=True):
        if tensor.requires_grad:
            raise ValueError(f"{name}: got a tensor that requires grad, expected a constant")
    loss, _, stats = torch.ops.mrl.policy_loss(
        logprobs,
        old_logprobs,
        loss_mask,
        cu_seqlens,
        advantages,
        seq_weight,
        ratio,
        clip_low,
        clip_high,
    )
    return PolicyLoss(loss, *stats.unbind())


def policy_loss_vectorized(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    seq_weight: Tensor,
    ratio: str,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op in plain torch ops on any device, without a host sync: stands in on GPUs for now.

    Element math in fp32, segment sums in fp64. Returns what the op returns: loss f64[], d loss /
    d logprobs f32[N], stats f64[4] (ratio sum, ratio count, ratio max, clip count).
    """
    given = (logprobs, old_logprobs, loss_mask, cu_seqlens, advantages, seq_weight)
    _check(*given, ratio, clip_low, clip_high)
    num_tokens, num_sequences = logprobs.numel(), advantages.numel()
    ordered = (cu_seqlens.diff() >= 0).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == num_tokens)
    torch._assert_async(ordered, "policy_loss: cu_seqlens must go from 0 to N, never decreasing")

    positions = torch.arange(num_tokens, device=logprobs.device, dtype=torch.int32)
    seq_ids = torch.searchsorted(cu_seqlens[1:], positions, right=True)
    keep = loss_mask != 0
    zeros = advantages.new_zeros(num_sequences, dtype=torch.float64)
    counts = zeros.index_add(0, seq_ids, keep.double())
    logratios = torch.where(keep, logprobs - old_logprobs, 0.0)
    slope = -seq_weight.double() * advantages.double()
    upper = torch.where(advantages > 0, 1.0 + clip_high, torch.inf).double()
    lower = torch.where(advantages < 0, 1.0 - clip_low, -torch.inf).double()

    if ratio == "token":
        ratios, valid = logratios.exp(), keep
        slope, upper, lower = slope[seq_ids], upper[seq_ids].float(), lower[seq_ids].float()
    else:
        sums = zeros.index_add(0, seq_ids, logratios.double())
        ratios, valid = (sums / counts.clamp(min=1)).exp(), counts > 0
    clipped = valid & ((ratios > upper) | (ratios < lower))
    bounded = torch.where(ratios > upper, upper, torch.where(ratios < lower, lower, ratios))
    # Selected where the slope is 0, so that 0 * inf cannot make a NaN.
    loss = torch.where(valid & (slope != 0), slope * bounded.double(), 0.0).sum()
    grad = torch.where(valid & ~clipped & (slope != 0), slope * ratios.double(), 0.0)
    if ratio == "sequence":
        grad = torch.where(keep, (grad / counts.clamp(min=1))[seq_ids], 0.0)
    counted = torch.where(valid, ratios.double(), 0.0)
    ratio_max = torch.cat([counted, counted.new_zeros(1)]).max()
    stats = torch.stack([counted.sum(), valid.sum().double(), ratio_max, clipped.sum().double()])
    return loss, grad.float(), stats


def _check(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    seq_weight: Tensor,
    ratio: str,
    clip_low: float,
    clip_high: float,
) -> None:
    if logprobs.dim() != 1:
        raise ValueError(f"logprobs: got shape {list(logprobs.shape)}, expected [N]")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens: got shape {list(cu_seqlens.shape)}, expected [B+1]")
    num_tokens, num_sequences = logprobs.numel(), cu_seqlens.numel() - 1
    fp32 = (torch.float32,)
    expected = {
        "logprobs": (logprobs, num_tokens, fp32),
        "old_logprobs": (old_logprobs, num_tokens, fp32),
        "loss_mask": (loss_mask, num_tokens, (torch.bool, torch.uint8)),
        "cu_seqlens": (cu_seqlens, num_sequences + 1, (torch.int32,)),
        "advantages": (advantages, num_sequences, fp32),
        "seq_weight": (seq_weight, num_sequences, fp32),
    }
    for name, (tensor, size, dtypes) in expected.items():
        if tensor.shape != (size,):
            raise ValueError(
                f"{name}: got shape {list(tensor.shape)}, expected [{size}] "
                f"(N = {num_tokens} tokens, B = {num_sequences} sequences)"
            )
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(f"{name}: got dtype {tensor.dtype}, expected {wanted}")
        if tensor.device != logprobs.device:
            raise ValueError(
                f"{name}: got device {tensor.device}, expected that of logprobs, {logprobs.device}"
            )
    if ratio not in _RATIOS:
        raise ValueError(f"ratio: got {ratio!r}, expected 'token' or 'sequence'")
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low: got {clip_low}, expected between 0 and 1")
    if not clip_high >= 0:
        raise ValueError(f"clip_high: got {clip_high}, expected at least 0")


torch.library.define(
    "mrl::policy_loss",
    "(Tensor logprobs, Tensor old_logprobs, Tensor loss_mask, Tensor cu_seqlens, "
    "Tensor advantages, Tensor seq_weight, str ratio, float clip_low, float clip_high) "
    "-> (Tensor loss, Tensor grad, Tensor stats)",
)
torch.library.impl("mrl::policy_loss", "cuda")(policy_loss_vectorized)


@torch.library.impl("mrl::policy_loss", "cpu")
def _policy_loss_cpu(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    seq_weight: Tensor,
    ratio: str,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    given = (logprobs, old_logprobs, loss_mask, cu_seqlens, advantages, seq_weight)
    _check(*given, ratio, clip_low, clip_high)
    inputs = dict(
        zip(
            ("logprobs", "old_logprobs", "loss_mask", "cu_seqlens", "advantages", "seq_weight"),
            [tensor.contiguous() for tensor in given],
            strict=True,
        )
    )
    loss = torch.empty((), dtype=torch.float64)
    grad = torch.empty(logprobs.numel(), dtype=torch.float32)
    stats = torch.empty(_NUM_STATS, dtype=torch.float64)
    _C.policy_loss(
        **{name: tensor.data_ptr() for name, tensor in inputs.items()},
        num_tokens=logprobs.numel(),
        num_sequences=advantages.numel(),
        ratio=_RATIOS[ratio],
        clip_low=clip_low,
        clip_high=clip_high,
        num_threads=torch.get_num_threads(),
        loss=loss.data_ptr(),
        grad=grad.data_ptr(),
        stats=stats.data_ptr(),
    )
    return loss, grad, stats


@torch.library.register_fake("mrl::policy_loss")
def _policy_loss_fake(logprobs: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check(logprobs, *rest)
    return (
        logprobs.new_empty((), dtype=torch.float64),
        logprobs.new_empty(logprobs.shape),
        logprobs.new_empty(_NUM_STATS, dtype=torch.float64),
    )


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, grad, stats = output
    ctx.mark_non_differentiable(grad, stats)
    ctx.save_for_backward(grad)


def _scale_gradient(ctx: Any, loss_grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (grad,) = ctx.saved_tensors
    return grad * loss_grad.to(grad.dtype), *[None] * 8


torch.library.register_autograd("mrl::policy_loss", _scale_gradient, setup_context=_save_gradient)
