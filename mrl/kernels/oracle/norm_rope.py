"""References of `rms_norm` and `rotate` in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the results of `mrl.kernels.rms_norm` in fp64. Arguments are the same."""
    rows = x.double() if residual is None else x.double() + residual.double()
    scale = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    return rows * scale * weight.double(), None if residual is None else rows


def rotate(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, head_size: int, *, halves: bool
) -> tuple[Tensor, Tensor]:
    """Return the results of `mrl.kernels.rotate` in fp64. Arguments are the same."""
    size = cos_sin.shape[1]
    cos, sin = cos_sin[positions].double().unsqueeze(1).chunk(2, dim=-1)
    results = []
    for tensor in (query, key):
        heads = tensor.double().unflatten(1, (-1, head_size)).clone()
        rotated = heads[..., :size]
        first, second = rotated.chunk(2, -1) if halves else (rotated[..., ::2], rotated[..., 1::2])
        pair = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.cat(pair, -1) if halves else torch.stack(pair, -1).flatten(-2)
        heads[..., :size] = joined
        results.append(heads.flatten(1))
    return results[0], results[1]
