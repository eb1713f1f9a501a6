"""This module has the cases of `moe_sort`, `moe_permute` and `moe_unpermute`: n tokens, E experts, K
experts a token, H hidden.

A case `sort` finds the copies' places. A case `layer` does all of a MoE layer but its experts: sorts,
copies tokens and gates, adds the copies up, and their gradients. Eager is what mrl's layers did before:
argsort, index_select, gather and embedding_bag.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_bench.case import Case, Outputs, Run, Work
from mrl.kernels import moe_permute, moe_sort, moe_unpermute, oracle

NOTHING = "has no copies of tokens to experts"
NOT_COMPILED = "torch.compile calls the same argsort and embedding_bag as eager: left out"


class Places(NamedTuple):
    tokens: Tensor  # i64[m]
    cells: Tensor  # i64[m]
    copies: Tensor  # i64[n, K]


def eager_sort(ids: Tensor, num_experts: int) -> Places:
    topk = ids.shape[1]
    order = ids.reshape(-1).argsort(stable=True)
    tokens = order.div(topk, rounding_mode="floor")
    places = torch.arange(len(order), device=ids.device)
    copies = torch.empty_like(order).scatter_(0, order, places).view_as(ids)
    return Places(tokens, tokens * num_experts + ids.reshape(-1).index_select(0, order), copies)


def eager_sum(rows: Tensor, copies: Tensor) -> Tensor:
    dtype = rows.dtype
    if rows.device.type == "cpu" and dtype.itemsize < 4:
        rows = rows.float()  # its CPU kernel accumulates in the dtype of the rows, CUDA's in fp32
    return F.embedding_bag(copies, rows.detach(), mode="sum").to(dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return rows.index_select(0, places.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return eager_sum(grad.contiguous(), ctx.places.copies), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return eager_sum(rows.contiguous(), places.copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return grad.index_select(0, ctx.places.tokens), None


def make_ids(case: Case, device: torch.device) -> Tensor:
    """Make ids i64[n, K], different experts by falling weight, as a router gives them."""
    num_tokens, num_experts, topk, _ = case.shape
    rng = torch.Generator().manual_seed(0)
    return torch.rand(num_tokens, num_experts, generator=rng).topk(topk).indices.to(device)


def build_sort(case: Case, device: torch.device, compile_: bool) -> Work:
    ids, num_experts = make_ids(case, device), case.shape[1]
    names = ("tokens", "cells", "copies")

    def fused() -> Outputs:
        return dict(zip(names, moe_sort(ids.int(), num_experts), strict=False))

    def expected() -> Outputs:
        places = oracle.moe_sort(ids, num_experts)
        return {name: place.double() for name, place in zip(names, places, strict=False)}

    return _work(
        fused, lambda: eager_sort(ids, num_experts)._asdict(), expected, dict.fromkeys(names, 0.0),
        ids.nbytes + 3 * 4 * ids.numel(),
    )  # fmt: skip


def build_layer(case: Case, device: torch.device, compile_: bool) -> Work:
    num_tokens, num_experts, topk, hidden = case.shape
    dtype, ids = getattr(torch, case.dtype), make_ids(case, device)
    rng = torch.Generator().manual_seed(1)
    rows = torch.randn(num_tokens, hidden, generator=rng).to(dtype).to(device)
    upstream = torch.randn(num_tokens, hidden, generator=rng).to(dtype).to(device)
    table = torch.rand(num_tokens, num_experts, generator=rng).to(device)

    def run(leaves: list[Tensor], grad: Tensor, spread: Any, add_up: Any) -> Outputs:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        copies, gates = spread(*leaves)
        summed = add_up(copies)
        outputs = [summed, gates]
        to_rows, to_table = torch.autograd.grad(outputs, leaves, [grad, torch.ones_like(gates)])
        return {"sums": summed.detach(), "to_rows": to_rows, "to_table": to_table}

    def fused() -> Outputs:
        order = moe_sort(ids.int(), num_experts)
        return run(
            [rows, table], upstream, lambda x, t: moe_permute(x, order, t),
            lambda x: moe_unpermute(x, order),
        )  # fmt: skip

    def plain() -> Outputs:
        places = eager_sort(ids, num_experts)

        def spread(x: Tensor, t: Tensor) -> tuple[Any, Tensor]:
            return _Spread.apply(x, places), t.reshape(-1).gather(0, places.cells)

        return run([rows, table], upstream, spread, lambda x: _AddUp.apply(x, places))

    def expected() -> Outputs:
        """Take the oracle's places; its own loop over the copies would take minutes at this size."""
        tokens, cells, _, _ = oracle.moe_sort(ids.cpu(), num_experts)
        exact = [rows.cpu().double(), table.cpu().double()]

        def add_up(copies: Tensor) -> Tensor:
            return torch.zeros_like(exact[0]).index_add(0, tokens, copies)

        return run(
            exact, upstream.cpu().double(), lambda x, t: (x[tokens], t.reshape(-1)[cells]), add_up
        )  # fmt: skip

    # Each direction reads rows once and writes each copy, reads each copy and writes rows.
    floor = 4 * rows.nbytes * (1 + topk)
    error = 2e-6 if dtype == torch.float32 else 8e-3
    tolerance = {"sums": error, "to_rows": error, "to_table": 0.0}
    return _work(fused, plain, expected, tolerance, floor)


def _work(kernel: Run, plain: Run, expected: Run, tolerance: dict[str, float], floor: int) -> Work:
    return Work(
        kernel=kernel,
        eager=plain,
        expected=expected,
        tolerance=tolerance,
        floor_bytes=floor,
        compiled=NOT_COMPILED,
        liger=f"Liger-Kernel {NOTHING}",
        trl=f"TRL {NOTHING}",
    )


def cases(quick: bool, cuda: bool) -> list[Case]:
    num_tokens, hidden = (16384, 2048) if cuda else (2048, 512)
    rounds = 2 if quick else 15
    shapes = [(num_tokens, 8, 2, hidden), (num_tokens, 64, 8, hidden), (num_tokens, 128, 8, hidden)]
    if quick:
        shapes = [(40, 8, 2, 16)]
    found = []
    for shape in shapes:
        found.append(Case("moe_sort", "sort", shape, "int64", build_sort, num_rounds=rounds))
        for dtype in ("float32", "bfloat16"):
            found.append(Case("moe_permute", "layer", shape, dtype, build_layer, num_rounds=rounds))
    return found
