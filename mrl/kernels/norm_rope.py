"""`rms_norm` and `rotate`: the norms and rotary embeddings of an inference batch, on CPUs.

These are inference ops without a gradient. All arithmetic is fp32, and the sum of a row has a fixed
order (see csrc/norm_rope.h), so the result of a token is bit-identical whatever the other tokens are.

Dimensions: T tokens, h heads, d head size, R rotated elements of a head, P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import backend


def supports_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> bool:
    """Return whether `rms_norm` supports these dtypes, devices and strides. Sizes are not checked."""
    others = (weight,) if residual is None else (weight, residual)
    return (
        x.dtype in backend.FLOAT_TYPES
        and x.device.type == "cpu"
        and x.dim() in {2, 3}
        and x.stride(-1) == 1
        and (x.dim() == 2 or x.stride(1) == x.shape[2])
        and all(o.dtype == x.dtype and o.device == x.device and o.is_contiguous() for o in others)
    )


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467) for each row of `x`.

    Args:
        x: [T, d] or [T, h, d] in fp32, bf16 or fp16, on the CPU. Tokens may be any distance apart; the
            elements of a token must be contiguous.
        weight: [d] in the dtype of `x`.
        eps: added to the mean.
        residual: of the shape and dtype of `x`, contiguous. If given, it is added to `x` first, in
            fp32.

    Returns:
        The normalised rows in the shape and dtype of `x`, and the sum of `x` and `residual`, rounded to
        that dtype; None without a residual.

    Raises:
        ValueError: for a wrong shape, dtype, device or stride.
    """
    if not supports_rms_norm(x, weight, residual):
        raise ValueError(
            f"rms_norm: got x {list(x.shape)} of {x.dtype} on {x.device} with strides "
            f"{list(x.stride())}, weight of {weight.dtype}"
            f"{'' if residual is None else f', residual of {residual.dtype}'}, expected [T, d] or "
            "[T, h, d] on the CPU with contiguous rows, and contiguous others of the same dtype, one "
            f"of {list(backend.FLOAT_TYPES)}"
        )
    size, dtypes = x.shape[-1], (x.dtype,)
    backend.check_tensor("weight", weight, (size,), dtypes, x.device, f"d = {size}")
    if residual is not None:
        legend = "the shape of x"
        backend.check_tensor("residual", residual, tuple(x.shape), dtypes, x.device, legend)
    out = torch.empty(x.shape, dtype=x.dtype)
    added = None if residual is None else torch.empty_like(out)
    backend.run(
        "rms_norm",
        x.device,
        type=backend.FLOAT_TYPES.index(x.dtype),
        x=x,
        residual=residual,
        weight=weight,
        num_tokens=x.shape[0],
        num_heads=1 if x.dim() == 2 else x.shape[1],
        size=size,
        stride=x.stride(0),
        eps=eps,
        out=out,
        sum=added,
    )
    return out, added


def supports_rotate(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> bool:
    """Return whether `rotate` supports these dtypes, devices and strides. Sizes are not checked."""
    return (
        query.dtype in backend.FLOAT_TYPES
        and key.dtype == query.dtype
        and positions.dtype == torch.int64
        and cos_sin.dtype == torch.float32
        and all(each.device.type == "cpu" for each in (query, key, positions, cos_sin))
        and positions.is_contiguous()
        and cos_sin.is_contiguous()
        and all(each.dim() == 2 and each.stride(1) == 1 for each in (query, key))
    )


def rotate(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, head_size: int, *, halves: bool
) -> tuple[Tensor, Tensor]:
    """Return queries and keys with rotary position embeddings (arXiv 2104.09864).

    Args:
        query: [T, h d] in fp32, bf16 or fp16, on the CPU. Tokens may be any distance apart.
        key: [T, g d] for g heads, of the same dtype.
        positions: i64[T].
        cos_sin: f32[P, R]: R / 2 cosines of each position, then R / 2 sines.
        head_size: d. The first R elements of a head are rotated, and the others copied.
        halves: whether element i is rotated with element i + R / 2, as in GPT-NeoX. Otherwise
            elements 2 i and 2 i + 1 are, as in GPT-J.

    Returns:
        Both tensors, contiguous, in the shapes and dtype that they had.

    Raises:
        ValueError: for a wrong shape, dtype, device or stride, and for a position outside of [0, P).
    """
    if not supports_rotate(query, key, positions, cos_sin):
        given = ", ".join(
            f"{name} {list(each.shape)} of {each.dtype} on {each.device} with strides "
            f"{list(each.stride())}"
            for name, each in (
                ("query", query), ("key", key), ("positions", positions), ("cos_sin", cos_sin)
            )
        )  # fmt: skip
        raise ValueError(
            f"rotate: got {given}, expected query and key [T, h d] with contiguous rows of one dtype "
            f"of {list(backend.FLOAT_TYPES)}, positions i64[T] and cos_sin f32[P, R], on the CPU"
        )
    num_tokens, rotary_size = query.shape[0], cos_sin.shape[-1]
    if (
        cos_sin.dim() != 2
        or positions.shape != (num_tokens,)
        or key.shape[0] != num_tokens
        or head_size < 1
        or query.shape[1] % head_size
        or key.shape[1] % head_size
        or rotary_size % 2
        or rotary_size > head_size
    ):
        raise ValueError(
            f"rotate: got query {list(query.shape)}, key {list(key.shape)}, positions "
            f"{list(positions.shape)} and cos_sin {list(cos_sin.shape)}, expected [T, h d], [T, g d], "
            f"[T] and [P, R] with d = {head_size} and an even R of at most d"
        )
    query_out, key_out = (torch.empty(each.shape, dtype=each.dtype) for each in (query, key))
    backend.run(
        "rotate",
        query.device,
        type=backend.FLOAT_TYPES.index(query.dtype),
        query=query,
        query_heads=query.shape[1] // head_size,
        query_stride=query.stride(0),
        query_out=query_out,
        key=key,
        key_heads=key.shape[1] // head_size,
        key_stride=key.stride(0),
        key_out=key_out,
        positions=positions,
        cos_sin=cos_sin,
        num_tokens=num_tokens,
        num_positions=cos_sin.shape[0],
        size=head_size,
        rotary_size=rotary_size,
        halves=halves,
    )
    return query_out, key_out
