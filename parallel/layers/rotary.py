"""Rotary position embeddings (RoFormer, arXiv 2104.09864 eq. 34) for a packed batch, in fp32.

Megatron rotates each sequence of a packed batch separately, waits until the host has the sequences'
lengths, and rounds cosines and sines to the dtype of the model. Here one gather by position serves
the whole batch and all layers of a stage, and queries and keys are multiplied in fp32, as in
SGLang's CUDA kernel with its fp32 cache (`sglang.srt.layers.rotary_embedding`).

Dimensions: n packed tokens of this rank, h heads, d head size, r rotated pairs (2 r <= d).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """The cosines and sines of the angles by which each token's pairs of dimensions are rotated."""

    cos: Tensor
    """f32[n, 1, r]: the cosines."""
    sin: Tensor
    """f32[n, 1, r]: the sines."""

    @classmethod
    def at(cls, angles: Tensor, positions: Tensor, scale: float = 1.0) -> Rotation:
        """Return the rotation of tokens at `positions` i64[n].

        `angles` f32[S, 1, 1, 2 r] are Megatron's rotary angles of the positions 0 to S-1; their second
        half repeats the first. `scale` multiplies cosines and sines (YaRN, arXiv 2309.00071).
        """
        half = angles.shape[-1] // 2
        own = angles[:, 0, :, :half].index_select(0, positions).float()
        cos, sin = own.cos(), own.sin()
        return cls(cos, sin) if scale == 1.0 else cls(cos * scale, sin * scale)

    def rotate(self, x: Tensor, interleaved: bool = False) -> Tensor:
        """Rotate the first 2 r dimensions of x [n, h, d], differentiably. Return [n, h, d].

        Pair i consists of the dimensions i and i + r. If `interleaved`, it consists of the
        dimensions 2i and 2i+1 in `x`, and of i and i + r in the result, as in DeepSeek's latent
        attention; all d dimensions must then be rotated.
        """
        return _Rotate.apply(x, self.cos, self.sin, interleaved)


def yarn_scale(config: Any) -> float:
    """Return the factor of cosines and sines in grouped-query attention with Megatron's settings
    `config`: `m(yarn_mscale) / m(yarn_mscale_all_dim)`, with `m(x) = 0.1 x ln(factor) + 1` (YaRN,
    arXiv 2309.00071); 1 without YaRN."""
    factor = getattr(config, "yarn_rotary_scaling_factor", 1.0)
    if factor <= 1.0:
        return 1.0
    over, under = (
        0.1 * x * math.log(factor) + 1 for x in (config.yarn_mscale, config.yarn_mscale_all_dim)
    )
    return over / under


class _Rotate(torch.autograd.Function):
    """A rotation. Its backward pass rotates the gradient back by the same angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        half = cos.shape[-1]
        first, second = _pairs(x, half, interleaved)
        _rotate_into(first, second, cos, sin, *_pairs(out, half, False))
        if x.shape[-1] > 2 * half:
            out[..., 2 * half :] = x[..., 2 * half :]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        cos, sin = ctx.saved_tensors
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        half = cos.shape[-1]
        first, second = _pairs(grad, half, False)
        _rotate_into(second, first, cos, sin, *reversed(_pairs(out, half, ctx.interleaved)))
        if grad.shape[-1] > 2 * half:
            out[..., 2 * half :] = grad[..., 2 * half :]
        return out, None, None, None


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    return x[..., :half], x[..., half : 2 * half]


def _rotate_into(
    first: Tensor, second: Tensor, cos: Tensor, sin: Tensor, to_first: Tensor, to_second: Tensor
) -> None:
    """Rotate the pairs (first, second) by the angles, and write the result to (to_first,
    to_second).

    If first and second are exchanged in both the input and the output, the rotation is by the
    negative angles.
    """
    torch.sub(first * cos, second * sin, out=to_first)
    torch.add(second * cos, first * sin, out=to_second)
