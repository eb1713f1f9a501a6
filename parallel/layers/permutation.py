"""Copy tokens to rows that are sorted by expert, and later sum the results of each token in a fixed
order.

Megatron's `unpermute` sums the K results of a token with `scatter_add_`, and the gradient of its
`permute` is an `index_add`: on a GPU both sum in an order that changes from run to run. Here each
of the two functions is one kernel of `mrl.kernels.moe_permute`, which sums the rows of a token in a
fixed order, in fp32. The gradient of each function is the other function.

Dimensions: n tokens of this rank, E experts, K experts per token, m copies (n K, except with the
all-gather dispatcher under expert parallelism), H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.kernels import ExpertOrder, moe_ids, moe_permute, moe_sort, moe_unpermute


@dataclass(frozen=True)
class Permutation:
    """The positions of each token's copies among all copies, which are sorted by expert, then by
    token."""

    order: ExpertOrder

    @classmethod
    def of_ids(cls, ids: Tensor, num_experts: int) -> Permutation:
        """Make the permutation from `ids` [n, K]: K different experts for each token, in the order
        in which their results are summed."""
        return cls(moe_sort(ids.int(), num_experts))

    @classmethod
    def of_full_map(cls, chosen: Tensor, topk: int) -> Permutation:
        """Make the permutation from `chosen` bool[n, E], which has exactly `topk` experts for each
        token. Results are summed in the order of expert index."""
        return cls(moe_sort(moe_ids(chosen, topk), chosen.shape[1]))

    @classmethod
    def of_map(cls, chosen: Tensor, topk: int | None = None) -> Permutation:
        """Make the permutation from `chosen` bool[n, E], which has up to `topk` experts for each
        token, or any number if `topk` is None. Results are summed in the order of expert index.

        The host waits for the device, because only the device knows the number of copies.
        """
        ids = moe_ids(chosen, chosen.shape[1] if topk is None else topk)
        return cls(moe_sort(ids, chosen.shape[1], int(chosen.sum())))

    @property
    def tokens(self) -> Tensor:
        """i32[m]: the index of each copy's token."""
        return self.order.tokens

    @property
    def cells(self) -> Tensor:
        """i32[m]: for each copy, the index of its (token, expert) entry in a flattened table
        [n, E]."""
        return self.order.cells

    @property
    def counts(self) -> Tensor:
        """i64[E]: the number of copies of each expert."""
        return self.order.counts

    def spread(self, rows: Tensor) -> Tensor:
        """Copy each token once for each of its experts. [n, H] becomes [m, H]."""
        return moe_permute(rows, self.order)[0]

    def spread_with(self, rows: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Copy `rows` [n, H] as `spread` does, and pick the (token, expert) entry of each copy from
        `table` [n, E], in one kernel. Return [m, H] and [m]. No entry is picked twice."""
        return moe_permute(rows, self.order, table)

    def add_up(self, rows: Tensor) -> Tensor:
        """Sum the rows of each token's copies; a token without copies gets 0. [m, H] becomes
        [n, H]."""
        return moe_unpermute(rows, self.order)


def by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort m rows stably by `experts` i64[m], the expert of each row. Return the arguments `order`
    and `back` of `reorder`, i32[m] each."""
    order = moe_sort(experts.int().unsqueeze(1), num_experts)
    return order.tokens, order.copies.squeeze(1)


def reorder(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Reorder rows [m, H], so that row i of the result is `rows[order[i]]`.

    `back` is the inverse of `order`, both i32[m].
    """
    return moe_permute(rows, _one_copy_each(order, back))[0]


def reorder_with(
    rows: Tensor, values: Tensor, order: Tensor, back: Tensor
) -> tuple[Tensor, Tensor]:
    """Reorder rows [m, H] and values [m] in one kernel, as `reorder` does."""
    return moe_permute(rows, _one_copy_each(order, back), values.unsqueeze(1))


def _one_copy_each(order: Tensor, back: Tensor) -> ExpertOrder:
    """Return an `ExpertOrder` that makes the permutation kernels only reorder m rows. It treats each
    row as a token with a single copy."""
    return ExpertOrder(order, order, back.unsqueeze(1), torch.ones_like(order).long())
