"""`paged_attention`: causal attention over a paged KV cache, for a whole batch of requests, on CPUs.

This is an inference op without a gradient. All sums have a fixed order (see csrc/paged_attention.h), so
the result of a query is bit-identical whatever other requests are in the batch.

Dimensions: B requests, M new tokens of all requests together, h query heads, g heads of keys and
values (a divisor of h), d head size of queries and keys, e head size of values, S slots of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import backend

_MULTIPLE = 8


def supports_paged_attention(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether `paged_attention` supports the dtypes, devices, head sizes and strides."""
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

    Request b has `seq_lens[b]` positions in the cache; its new tokens are the last of them. The query
    at position p attends to the positions max(0, p - window) to p of the same request. Products and
    sums are computed in fp32.

    Args:
        query: [M, h, d] in fp32, bf16 or fp16, on the CPU: the queries of the new tokens, request
            after request. In `query`, `k_cache` and `v_cache` the last dimension must have stride 1,
            and its size must be a multiple of 8.
        k_cache: [S, g, d] in the dtype of `query`.
        v_cache: [S, g, e] in the dtype of `query`.
        req_to_token: i32[R, P], the slot of each position of R requests, of which each has up to P
            positions; the last dimension must have stride 1.
        req_pool_indices: i32[B] or i64[B], the row of `req_to_token` of each request.
        seq_lens: i32[B] or i64[B], the number of positions of each request.
        query_starts: i32[B+1] or i64[B+1]: request b has the queries `query_starts[b]` to
            `query_starts[b+1] - 1`. None: each request has one query.
        scale: the factor by which the scores are multiplied.
        window: how many earlier positions a query attends to; None for all.
        out: contiguous tensor that receives the result; None for a new tensor.

    Raises:
        ValueError: for a wrong shape, dtype, device or stride, for a request or slot out of range,
            for a negative `window`, for a request with fewer positions than queries, and for
            `query_starts` that do not cover exactly the M queries.
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
