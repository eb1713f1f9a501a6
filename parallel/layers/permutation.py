"""Copies of tokens sorted by expert, and their sums back in the tokens' places, without a race.

Megatron's `unpermute` adds the K results of a token with `scatter_add_`, and the gradient of its
`permute` is an `index_add`: on a GPU both add in an order that changes from run to run. Here both are
one gather that adds up the rows of a token in a fixed order (`embedding_bag`, which accumulates in
fp32), and each is the gradient of the other.

n tokens of this rank, E experts, K experts per token, m copies (n K, but for the all-gather dispatcher
under expert parallelism), H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Permutation:
    """Holds the place of each token's copies among all copies, sorted by expert, then by token."""

    tokens: Tensor
    """i64[m]: the token of each copy."""
    cells: Tensor
    """i64[m]: the place of each copy's (token, expert) in a table [n, E] laid end to end."""
    copies: Tensor
    """i64[n, K]: the copies of each token in the order in which they are added up; i64[m], token after
    token, where `starts` says where each token's begin."""
    starts: Tensor | None = None
    """i64[n]."""

    @classmethod
    def of_ids(cls, ids: Tensor, num_experts: int) -> Permutation:
        """ids i64[n, K], K different experts a token in the order in which they are to be added up."""
        num_tokens, topk = ids.shape
        order = ids.reshape(-1).argsort(stable=True)
        tokens = order.div(topk, rounding_mode="floor")
        copies = inverse(order).view(num_tokens, topk)
        cells = tokens * num_experts + ids.reshape(-1).index_select(0, order)
        return cls(tokens, cells, copies)

    @classmethod
    def of_map(cls, chosen: Tensor) -> Permutation:
        """Make it of chosen bool[n, E], any number of experts a token, added up by number. Waits
        for the device: how many copies there are is known there alone."""
        num_tokens, num_experts = chosen.shape
        places = chosen.T.reshape(-1).nonzero().squeeze(1)
        experts = places.div(max(num_tokens, 1), rounding_mode="floor")
        tokens = places - experts * num_tokens
        counts = chosen.sum(1)
        copies = tokens.argsort(stable=True)
        return cls(tokens, tokens * num_experts + experts, copies, counts.cumsum(0) - counts)

    def spread(self, rows: Tensor) -> Tensor:
        """Copy its token to each choice: [n, H] -> [m, H]."""
        return _Spread.apply(rows, self)

    def add_up(self, rows: Tensor) -> Tensor:
        """[m, H] -> [n, H]: the sum over a token's copies, 0 for a token without any."""
        return _AddUp.apply(rows, self)

    def pick(self, table: Tensor) -> Tensor:
        """Pick the entry of each choice: [n, E] -> [m]. No two choices share one."""
        return table.reshape(-1).gather(0, self.cells)


def sorted_ids(chosen: Tensor, topk: int) -> Tensor:
    """Return i64[n, K], ascending expert numbers of chosen bool[n, E] with `topk` experts a token."""
    num_experts = chosen.shape[1]
    falling = torch.arange(num_experts, 0, -1, device=chosen.device, dtype=torch.int32)
    return num_experts - (chosen * falling).topk(topk).values.long()


def inverse(order: Tensor) -> Tensor:
    """Invert a permutation i64[m]."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def reorder(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """[m, ...] -> [m, ...]: row i is `rows[order[i]]`; `back` is the inverse of `order`."""
    return _Reorder.apply(rows, order, back)


def _sum_of_copies(rows: Tensor, permutation: Permutation) -> Tensor:
    if not len(rows):
        num_tokens = len(permutation.copies if permutation.starts is None else permutation.starts)
        return rows.new_zeros(num_tokens, rows.shape[1])
    rows, dtype = rows.detach(), rows.dtype
    if rows.device.type == "cpu" and dtype.itemsize < 4:
        rows = rows.float()  # its CPU kernel accumulates in the dtype of the rows, CUDA's in fp32
    summed = F.embedding_bag(permutation.copies, rows, permutation.starts, mode="sum")
    return summed.to(dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return rows.index_select(0, permutation.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return _sum_of_copies(grad.contiguous(), ctx.permutation), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return _sum_of_copies(rows.contiguous(), permutation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return grad.index_select(0, ctx.permutation.tokens), None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        _, back = ctx.saved_tensors
        return grad.index_select(0, back), None, None
