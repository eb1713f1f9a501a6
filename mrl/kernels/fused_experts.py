"""`fused_experts`: compute the experts of an MoE layer for a batch of tokens, on CPUs.

This is an inference op without a gradient. All sums have a fixed order (see csrc/fused_experts.h), so
the result of a token is bit-identical whatever the other tokens are.

Dimensions: T tokens, k experts per token, E experts, H hidden size, I size of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mrl.kernels import backend

_MULTIPLE = 8


class GatedActivation(NamedTuple):
    """The activation `gate * sigmoid(alpha * gate) * (up + up_shift)` of an expert.

    The first projection's output, [2I], contains `gate` [I] and `up` [I]. The defaults are SwiGLU
    (arXiv 2002.05202).
    """

    alpha: float = 1.0
    limit: float | None = None
    """If given, `gate` is first clamped to at most `limit`, and `up` to the range [-limit, limit]."""
    up_shift: float = 0.0
    interleaved: bool = False
    """Whether elements of `gate` and `up` alternate in the first projection's output. Otherwise
    `gate` comes first as a whole, then `up`."""


SWIGLU = GatedActivation()


def gpt_oss_swiglu(alpha: float, limit: float) -> GatedActivation:
    """Return gpt-oss's variant of SwiGLU: clamped, with `up + 1`, and with gate and up interleaved."""
    return GatedActivation(alpha, limit, up_shift=1.0, interleaved=True)


def supports_fused_experts(x: Tensor, w13: Tensor, w2: Tensor) -> bool:
    """Return whether `fused_experts` supports these tensors.

    Only dtypes, devices, strides and the size of the last dimension are checked.
    """
    return x.dtype in backend.FLOAT_TYPES and all(
        each.dtype == x.dtype
        and each.device.type == "cpu"
        and each.is_contiguous()
        and each.shape[-1] > 0
        and each.shape[-1] % _MULTIPLE == 0
        for each in (x, w13, w2)
    )


def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: GatedActivation = SWIGLU,
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, [T, H] in the dtype of `x`.

    Products, sums and the activation are computed in fp32. The result is 0 for a token without
    experts.

    Args:
        x: [T, H] in fp32, bf16 or fp16, on the CPU; H and I must be multiples of 8. `x`, `w13` and
            `w2` must be contiguous.
        w13: [E, 2I, H], gate and up projections, in the dtype of `x`.
        w2: [E, H, I], down projections, in the dtype of `x`.
        topk_ids: i32[T, k] or i64[T, k], the experts of each token; -1 for an empty slot.
        topk_weights: f32[T, k], the weight of each expert in the sum.
        activation: the activation between the two projections.
        w13_bias: [E, 2I] in fp32, bf16 or fp16; None for no bias.
        w2_bias: [E, H] in fp32, bf16 or fp16; None for no bias.

    Raises:
        ValueError: for a wrong shape, dtype, device or stride, for an expert id below -1 or above
            E - 1, and for a negative `activation.limit`.
    """
    if not supports_fused_experts(x, w13, w2) or x.dim() != 2 or w13.dim() != 3:
        given = ", ".join(
            f"{name} {list(each.shape)} of {each.dtype} on {each.device} with strides "
            f"{list(each.stride())}"
            for name, each in (("x", x), ("w13", w13), ("w2", w2))
        )
        raise ValueError(
            f"fused_experts: got {given}, expected x [T, H], w13 [E, 2I, H] and w2 [E, H, I], "
            f"contiguous, on the CPU, of one dtype of {list(backend.FLOAT_TYPES)}, and H and I "
            f"multiples of {_MULTIPLE}"
        )
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids: got {list(topk_ids.shape)}, expected [T, k]")
    if activation.limit is not None and not activation.limit >= 0:
        raise ValueError(f"limit: got {activation.limit}, expected at least 0, or None")
    (num_tokens, hidden), num_experts, size = x.shape, len(w13), w2.shape[-1]
    legend = f"E = {num_experts} experts, H = {hidden}, I = {size}, T = {num_tokens} tokens"
    device, dtypes, integers = x.device, (x.dtype,), (torch.int32, torch.int64)
    backend.check_tensor("w13", w13, (num_experts, 2 * size, hidden), dtypes, device, legend)
    backend.check_tensor("w2", w2, (num_experts, hidden, size), dtypes, device, legend)
    top_k = topk_ids.shape[-1]
    backend.check_tensor("topk_ids", topk_ids, (num_tokens, top_k), integers, device, legend)
    weights = (topk_weights, (num_tokens, top_k), (torch.float32,))
    backend.check_tensor("topk_weights", *weights, device, legend)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    if w13_bias is not None:
        shape = (num_experts, 2 * size)
        backend.check_tensor("w13_bias", w13_bias, shape, floats, device, legend)
    if w2_bias is not None:
        backend.check_tensor("w2_bias", w2_bias, (num_experts, hidden), floats, device, legend)
    out = torch.empty_like(x)
    backend.run(
        "fused_experts",
        device,
        type=backend.FLOAT_TYPES.index(x.dtype),
        x=x,
        w13=w13,
        w2=w2,
        w13_bias=_float32(w13_bias),
        w2_bias=_float32(w2_bias),
        ids=topk_ids.to(torch.int64).contiguous(),
        weights=topk_weights.contiguous(),
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        hidden_size=hidden,
        expert_size=size,
        interleaved=activation.interleaved,
        alpha=activation.alpha,
        limit=-1.0 if activation.limit is None else activation.limit,
        up_shift=activation.up_shift,
        out=out,
    )
    return out


def _float32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()
