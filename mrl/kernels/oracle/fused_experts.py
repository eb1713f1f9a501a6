"""Reference of `fused_experts` in fp64: one token and one expert at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
    interleaved: bool = False,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """Return the result of `mrl.kernels.fused_experts` as f64[T, H].

    The arguments are those of `mrl.kernels.fused_experts`, except that the fields of `activation`
    are separate arguments.
    """
    out = torch.zeros(*x.shape, dtype=torch.float64)
    size = w2.shape[2]
    for token in range(len(x)):
        for expert, weight in zip(
            topk_ids[token].tolist(), topk_weights[token].tolist(), strict=True
        ):
            if expert < 0:
                continue
            products = w13[expert].double() @ x[token].double()
            if w13_bias is not None:
                products = products + w13_bias[expert].double()
            gate, up = products[:size], products[size:]
            if interleaved:
                gate, up = products[0::2], products[1::2]
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            result = w2[expert].double() @ (gate * torch.sigmoid(alpha * gate) * (up + up_shift))
            if w2_bias is not None:
                result = result + w2_bias[expert].double()
            out[token] += weight * result
    return out
