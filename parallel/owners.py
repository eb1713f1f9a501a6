"""Which rank keeps the optimizer state of which parameter, where whole parameters are divided among
data-parallel ranks. Pure arithmetic, shared by the optimizer and the memory plan."""

from __future__ import annotations

from collections.abc import Sequence

MATRIX_COST, VECTOR_COST = 2, 3
"""Tensors of state per element: Muon has a momentum, Adam two moments, and both a main parameter."""


def assign(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank of each item, so that the sums of the ranks' costs are about equal.

    The largest item goes first, each to the rank with the smallest sum so far (Graham's longest
    processing time rule: the largest sum is at most 4/3 of the best one). Every rank that passes the
    same costs gets the same answer.
    """
    ranks, sums = [0] * len(costs), [0] * num_ranks
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = min(range(num_ranks), key=lambda r: sums[r])
        ranks[item] = rank
        sums[rank] += costs[item]
    return ranks
