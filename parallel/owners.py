"""Which rank keeps the optimizer state of which parameter, where whole parameters are divided among
data-parallel ranks. Pure arithmetic, shared by the optimizer and the memory plan."""

from __future__ import annotations

from collections.abc import Sequence


def num_states(*, is_muons: bool, has_main: bool) -> int:
    """Return the number of fp32 tensors of state that a parameter has: Muon's momentum or Adam's two
    moments, and a main parameter (`has_main`) if the parameter is not fp32."""
    return (1 if is_muons else 2) + has_main


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
