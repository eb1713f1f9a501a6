"""This module has the cases of `paged_attention`: B requests, h heads, g groups of keys and values, d
head size, and the mean number of positions of a request.

In a case `decode` each request has one new token, in a case `extend` all of its tokens are new, and in
a case `cached` the last quarter. Eager is what SGLang's torch_native backend does on CPUs: one call of
`scaled_dot_product_attention` for each request, in Python, in which the cached tokens have queries too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_bench.case import Case, Outputs, Work
from mrl.kernels import oracle, paged_attention

NOTHING = "has no attention over a paged cache"
NOT_COMPILED = "torch.compile cannot trace a loop over lengths that are data: left out"
SHARE_OF_NEW = {"extend": 1.0, "cached": 0.25}


class Batch(NamedTuple):
    """The arguments of paged_attention."""

    query: Tensor  # [M, h, d]
    k_cache: Tensor  # [S, g, d]
    v_cache: Tensor  # [S, g, d]
    req_to_token: Tensor  # i32[B, P]
    req_pool_indices: Tensor  # i64[B]
    seq_lens: Tensor  # i64[B]
    query_starts: Tensor | None  # i64[B + 1]


def make_batch(case: Case) -> Batch:
    """Make requests of random lengths within 50% of the mean, in random slots."""
    num_requests, heads, groups, size, mean = case.shape
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(mean // 2, mean + mean // 2 + 1, (num_requests,), generator=rng)
    num_slots = int(lengths.sum())
    table = torch.zeros(num_requests, int(lengths.max()), dtype=torch.int32)
    slots = torch.randperm(num_slots, generator=rng).int()
    for row, part in zip(table, slots.split(lengths.tolist()), strict=True):
        row[: len(part)] = part
    starts, num_queries = None, num_requests
    if case.variant in SHARE_OF_NEW:
        new = (lengths * SHARE_OF_NEW[case.variant]).ceil().long()
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)])
        num_queries = int(new.sum())
    query, k, v = (
        torch.randn(rows, count, size, generator=rng).to(getattr(torch, case.dtype))
        for rows, count in ((num_queries, heads), (num_slots, groups), (num_slots, groups))
    )
    return Batch(query, k, v, table, torch.arange(num_requests), lengths, starts)


def loop(batch: Batch, scale: float) -> Tensor:
    """Compute one request after the other, as SGLang does."""
    out = torch.empty_like(batch.query)
    starts = batch.query_starts
    for i, row in enumerate(batch.req_pool_indices):
        length = int(batch.seq_lens[i])
        slots = batch.req_to_token[row, :length]
        k, v = (x[slots].movedim(0, 1).unsqueeze(0) for x in (batch.k_cache, batch.v_cache))
        first, last = (i, i + 1) if starts is None else (starts[i], starts[i + 1])
        q = batch.query[first:last].movedim(0, 1)
        if starts is not None:
            cached = length - (last - first)
            padded = torch.empty(q.shape[0], length, q.shape[2], dtype=q.dtype)
            padded[:, cached:] = q
            q = padded
        result = F.scaled_dot_product_attention(
            q.unsqueeze(0), k, v, is_causal=starts is not None, enable_gqa=True, scale=scale
        )
        out[first:last] = result[0].movedim(1, 0)[first - last :]
    return out


def build(case: Case, device: torch.device, compile_: bool) -> Work:
    batch = make_batch(case)
    scale = case.shape[3] ** -0.5

    def expected() -> Outputs:
        return {"out": oracle.paged_attention(*batch, scale=scale)}

    return Work(
        kernel=lambda: {"out": paged_attention(*batch, scale=scale)},
        eager=lambda: {"out": loop(batch, scale)},
        expected=expected,
        tolerance={"out": 1e-6 if case.dtype == "float32" else 4e-3},
        # Every key, value and query is read once and the output written.
        floor_bytes=batch.k_cache.nbytes * 2 + batch.query.nbytes * 2,
        compiled=NOT_COMPILED,
        liger=f"Liger-Kernel {NOTHING}",
        trl=f"TRL {NOTHING}",
    )


def cases(quick: bool, cuda: bool) -> list[Case]:
    """Cases of the toy model, of SmolLM2-135M and of a model with heads of size 128; CPUs only."""
    if cuda:
        return []
    small = [(3, 4, 2, 16, 9)]
    shapes = {
        "decode": small if quick else [(128, 4, 2, 16, 30), (32, 9, 3, 64, 60), (8, 32, 4, 128, 1000)],
        "extend": small if quick else [(128, 4, 2, 16, 12), (32, 9, 3, 64, 40)],
        "cached": small if quick else [(32, 9, 3, 64, 80)],
    }  # fmt: skip
    return [
        Case("paged_attention", variant, shape, dtype, build, num_rounds=2 if quick else 15)
        for variant, found in shapes.items()
        for shape in found
        for dtype in ("float32", "bfloat16")
    ]
