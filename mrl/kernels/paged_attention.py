"""`paged_attention`: causal attention over a paged cache, for a whole batch of requests, on CPUs.

An inference op without a gradient. csrc/paged_attention.h has its order of sums: the bits of a
query depend on its own request and position only.

Dimensions: B requests, M new tokens of all of them, h heads, g groups of keys and values (a divisor
of h), d and e head sizes of keys and values, S slots of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import backend

_MULTIPLE = 8


def supports_paged_attention(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether `paged_attention` computes with these dtypes, devices, head sizes and strides."""
    tensors = (query, k_cache, v_cache)
    return query.dtype in backend.FLOAT_TYPES and all(
        x.dtype == query.dtype
        and x.device.type == "cpu"
        and x.dim() == 3
        and x.shape[2] > 0
        and x.shape[2] % _MULTIPLE == 0
        and x.stride(2) == 1
        for x in tensors
    )


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return `softmax(scale * q @ k.T) @ v`, [M, h, e] in the dtype of `query`.

    Request b has `seq_lens[b]` positions in the cache, the new tokens included, which are its last
    ones. The query at position p attends to positions [max(0, p - window), p].

    Args:
        query: [M, h, d] in fp32, bf16 or fp16; products and sums are fp32.
        k_cache: [S, g, d] in the dtype of `query`. The last dimension has stride 1, and d and e are
            multiples of 8.
        v_cache: [S, g, e], likewise.
        req_to_token: i32[R, P], the slot of each position; its last dimension has stride 1.
        req_pool_indices: int[B], the row of `req_to_token` of each request.
        seq_lens: int[B], the number of positions of each request.
        query_starts: int[B+1], where the queries of each request begin; None if each has one.
        scale: factor of the scores.
        window: how many earlier positions a query sees; None for all.
        out: contiguous tensor for the result; None for a new one.

    Raises:
        ValueError: for a wrong shape, dtype or stride, for a request or slot out of range, and for
            a request with fewer positions than queries.
    """
    if not supports_paged_attention(query, k_cache, v_cache):
        given = ", ".join(
            f"{name} {list(x.shape)} of {x.dtype} on {x.device} with strides {list(x.stride())}"
            for name, x in (("query", query), ("k_cache", k_cache), ("v_cache", v_cache))
        )
        raise ValueError(
            f"paged_attention: got {given}, expected three dimensions, one of "
            f"{list(backend.FLOAT_TYPES)} on the CPU, head sizes that are multiples of {_MULTIPLE}, "
            "and stride 1 in the last dimension"
        )
    num_queries, heads, key_size = query.shape
    num_slots, groups, value_size = v_cache.shape
    num_requests, device = len(seq_lens), query.device
    legend = f"S = {num_slots} slots, g = {groups} groups, h = {heads} heads, B = {num_requests}"
    integers, dtypes = (torch.int32, torch.int64), (query.dtype,)
    backend.check_tensor("k_cache", k_cache, (num_slots, groups, key_size), dtypes, device, legend)
    if req_to_token.dim() != 2 or req_to_token.dtype != torch.int32 or req_to_token.stride(1) != 1:
        raise ValueError(
            f"req_to_token: got {req_to_token.dtype} {list(req_to_token.shape)}, expected i32[R, P] "
            "with stride 1 in the last dimension"
        )
    backend.check_tensor(
        "req_to_token", req_to_token, tuple(req_to_token.shape), (torch.int32,), device, legend
    )
    bounds = {"req_pool_indices": (req_pool_indices, 0), "seq_lens": (seq_lens, 0)}
    if query_starts is not None:
        bounds["query_starts"] = (query_starts, 1)
    for name, (tensor, extra) in bounds.items():
        backend.check_tensor(name, tensor, (num_requests + extra,), integers, device, legend)
    if not groups or heads % groups:
        raise ValueError(f"paged_attention: {heads} heads are not divisible by {groups} groups")
    if window is not None and not (isinstance(window, int) and 0 <= window < 1 << 63):
        raise ValueError(f"window: got {window}, expected an integer of at least 0, or None")
    shape = (num_queries, heads, value_size)
    result: Tensor = query.new_empty(shape) if out is None else out
    backend.check_tensor("out", result, shape, dtypes, device, legend)
    if not result.is_contiguous():
        raise ValueError(f"out: got strides {list(result.stride())}, expected a contiguous tensor")
    backend.run(
        "paged_attention",
        device,
        type=backend.FLOAT_TYPES.index(query.dtype),
        queries=query,
        keys=k_cache,
        values=v_cache,
        slots=req_to_token,
        requests=_int64(req_pool_indices),
        lengths=_int64(seq_lens),
        query_starts=None if query_starts is None else _int64(query_starts),
        num_requests=num_requests,
        num_queries=num_queries,
        num_heads=heads,
        num_groups=groups,
        key_size=key_size,
        value_size=value_size,
        num_slots=num_slots,
        max_requests=req_to_token.shape[0],
        max_positions=req_to_token.shape[1],
        query_stride=query.stride(0),
        query_head_stride=query.stride(1),
        key_stride=k_cache.stride(0),
        key_head_stride=k_cache.stride(1),
        value_stride=v_cache.stride(0),
        value_head_stride=v_cache.stride(1),
        slot_stride=req_to_token.stride(0),
        window=-1 if window is None else window,
        scale=scale,
        out=result,
    )
    return result


def _int64(values: Tensor) -> Tensor:
    return values.to(torch.int64).contiguous()
