"""`rms_norm` and `rotate`: the norms and rotary embeddings of an inference batch, on CPUs.

These are inference ops without a gradient. All arithmetic is fp32, and the sum of a row has a fixed
order (see csrc/norm_rope.h), so the result of a token is bit-identical whatever the other tokens are.

Dimensions: T tokens, h heads, d head size, R rotated elements of a head, P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mrl._C as _C  # noqa: PLR0402  (a module, and no name of the package)
from mrl.kernels.backend import FLOAT_TYPES

_TYPES = {dtype: number for number, dtype in enumerate(FLOAT_TYPES)}


def supports_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> bool:
    """Return whether `rms_norm` supports these tensors."""
    shape, dtype = x.shape, x.dtype
    return (
        dtype in _TYPES
        and x.is_cpu
        and (len(shape) == 2 or (len(shape) == 3 and x.stride(1) == shape[2]))
        and x.stride(-1) == 1
        and weight.shape == shape[-1:]
        and weight.dtype == dtype
        and weight.is_cpu
        and weight.is_contiguous()
        and (
            residual is None
            or (
                residual.shape == shape
                and residual.dtype == dtype
                and residual.is_cpu
                and residual.is_contiguous()
            )
        )
    )


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467) for each row of `x`.

    Args:
        x: [T, d] or [T, h, d] in fp32, bf16 or fp16, on the CPU. Tokens may be any distance apart; the
            elements of a token must be contiguous.
        weight: [d] in the dtype of `x`, contiguous.
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
        given = {"x": x, "weight": weight} | ({} if residual is None else {"residual": residual})
        raise ValueError(
            f"rms_norm: got {_described(given)}, expected x [T, d] or [T, h, d] with contiguous "
            "elements of a token, weight [d], and a residual of the shape of x, on the CPU and of one "
            f"dtype of {list(FLOAT_TYPES)}"
        )
    shape = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    added = None if residual is None else torch.empty_like(out)
    _C.rms_norm_cpu(
        _TYPES[x.dtype],
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        shape[0],
        1 if len(shape) == 2 else shape[1],
        shape[-1],
        x.stride(0),
        eps,
        out.data_ptr(),
        0 if added is None else added.data_ptr(),
        torch.get_num_threads(),
    )
    return out, added


def supports_rotate(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, head_size: int
) -> bool:
    """Return whether `rotate` supports these tensors."""
    return (
        query.dtype in _TYPES
        and key.dtype == query.dtype
        and query.dim() == key.dim() == cos_sin.dim() == 2
        and query.stride(1) == key.stride(1) == 1
        and positions.shape == query.shape[:1] == key.shape[:1]
        and positions.dtype == torch.int64
        and positions.is_contiguous()
        and cos_sin.dtype == torch.float32
        and cos_sin.is_contiguous()
        and head_size >= cos_sin.shape[1] > 0 == cos_sin.shape[1] % 2
        and 0 == query.shape[1] % head_size == key.shape[1] % head_size
        and query.is_cpu
        and key.is_cpu
        and positions.is_cpu
        and cos_sin.is_cpu
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
    if not supports_rotate(query, key, positions, cos_sin, head_size):
        given = {"query": query, "key": key, "positions": positions, "cos_sin": cos_sin}
        raise ValueError(
            f"rotate: got {_described(given)}, expected query [T, h d] and key [T, g d] with "
            f"contiguous rows of one dtype of {list(FLOAT_TYPES)}, positions i64[T] and cos_sin "
            f"f32[P, R], on the CPU, with d = {head_size} and an even R of at most d"
        )
    query_out = torch.empty_like(query, memory_format=torch.contiguous_format)
    key_out = torch.empty_like(key, memory_format=torch.contiguous_format)
    _C.rotate_cpu(
        _TYPES[query.dtype],
        query.data_ptr(),
        query.shape[1] // head_size,
        query.stride(0),
        query_out.data_ptr(),
        key.data_ptr(),
        key.shape[1] // head_size,
        key.stride(0),
        key_out.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        query.shape[0],
        cos_sin.shape[0],
        head_size,
        cos_sin.shape[1],
        halves,
        torch.get_num_threads(),
    )
    return query_out, key_out


def _described(tensors: dict[str, Tensor]) -> str:
    return ", ".join(
        f"{name} {list(each.shape)} of {each.dtype} on {each.device} with strides "
        f"{list(each.stride())}"
        for name, each in tensors.items()
    )
