"""Copies of tokens sorted by expert, and their sums back in the tokens' places, without a race.

Megatron's `unpermute` adds the K results of a token with `scatter_add_`, and the gradient of its
`permute` is an `index_add`: on a GPU both add in an order that changes from run to run. Here both are
one kernel of `mrl.kernels.moe_permute` that adds up the rows of a token in a fixed order, in fp32, and
each is the gradient of the other.

n tokens of this rank, E experts, K experts per token, m copies (n K, but for the all-gather dispatcher
under expert parallelism), H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.kernels import ExpertOrder, moe_ids, moe_permute, moe_sort, moe_unpermute


@dataclass(frozen=True)
class Permutation:
    """Holds the place of each token's copies among all copies, sorted by expert, then by token."""

    order: ExpertOrder

    @classmethod
    def of_ids(cls, ids: Tensor, num_experts: int) -> Permutation:
        """ids [n, K], K different experts a token in the order in which they are to be added up."""
        return cls(moe_sort(ids.int(), num_experts))

    @classmethod
    def of_full_map(cls, chosen: Tensor, topk: int) -> Permutation:
        """Make it of chosen bool[n, E], exactly `topk` experts a token, added up by number."""
        return cls(moe_sort(moe_ids(chosen, topk), chosen.shape[1]))

    @classmethod
    def of_map(cls, chosen: Tensor, topk: int | None = None) -> Permutation:
        """Make it of chosen bool[n, E], up to `topk` experts a token (None: any number), added up by
        number. Waits for the device: how many copies there are is known there alone."""
        ids = moe_ids(chosen, chosen.shape[1] if topk is None else topk)
        return cls(moe_sort(ids, chosen.shape[1], int(chosen.sum())))

    @property
    def tokens(self) -> Tensor:
        """i32[m]: the token of each copy."""
        return self.order.tokens

    @property
    def cells(self) -> Tensor:
        """i32[m]: the place of each copy's (token, expert) in a table [n, E] laid end to end."""
        return self.order.cells

    @property
    def counts(self) -> Tensor:
        """i64[E]: how many copies each expert has."""
        return self.order.counts

    def spread(self, rows: Tensor) -> Tensor:
        """Copy its token to each choice: [n, H] -> [m, H]."""
        return moe_permute(rows, self.order)[0]

    def spread_with(self, rows: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Do `spread` and `pick` in one kernel: [n, H] and [n, E] -> [m, H] and [m]."""
        return moe_permute(rows, self.order, table)

    def pick(self, table: Tensor) -> Tensor:
        """Pick the entry of each choice: [n, E] -> [m]. No two choices share one."""
        return moe_permute(table[:, :0], self.order, table)[1]

    def add_up(self, rows: Tensor) -> Tensor:
        """[m, H] -> [n, H]: the sum over a token's copies, 0 for a token without any."""
        return moe_unpermute(rows, self.order)


def by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort rows by their experts i64[m], stably -> (order, back), i32[m] each, for `reorder`."""
    order = moe_sort(experts.int().unsqueeze(1), num_experts)
    return order.tokens, order.copies.squeeze(1)


def reorder(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """[m, H] -> [m, H]: row i is `rows[order[i]]`; `back` is the inverse of `order`, both i32[m]."""
    return moe_permute(rows, _one_copy_each(order, back))[0]


def reorder_with(
    rows: Tensor, values: Tensor, order: Tensor, back: Tensor
) -> tuple[Tensor, Tensor]:
    """Do `reorder` of rows [m, H] and of values [m] in one kernel."""
    return moe_permute(rows, _one_copy_each(order, back), values.unsqueeze(1))


def _one_copy_each(order: Tensor, back: Tensor) -> ExpertOrder:
    """Return the order of m tokens with one choice each, of a table with one column."""
    return ExpertOrder(order, order, back.unsqueeze(1), torch.ones_like(order).long())
