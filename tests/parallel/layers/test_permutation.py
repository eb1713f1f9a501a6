"""Copies of tokens sorted by expert and summed back: Megatron's numbers, in a fixed order."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from parallel import prepare
from parallel.layers.permutation import Permutation, by_expert, reorder, reorder_with

prepare()

TOKENS, EXPERTS, TOPK, HIDDEN = 37, 6, 3, 8


@pytest.fixture
def ids() -> Tensor:
    """i64[n, K] in the order of a route, which is not that of the numbers."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices


def inverse(order: Tensor) -> Tensor:
    """Invert a permutation i64[m]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def sorted_ids(chosen: Tensor, topk: int) -> Tensor:
    """Return i64[n, K], ascending expert numbers of chosen bool[n, E] with `topk` experts a token."""
    return chosen.nonzero()[:, 1].view(-1, topk)


def as_map(ids: Tensor) -> Tensor:
    return torch.zeros(len(ids), EXPERTS, dtype=torch.bool).scatter_(1, ids, True)


def permutations(ids: Tensor) -> list[Permutation]:
    chosen = as_map(ids)
    assert torch.equal(sorted_ids(chosen, TOPK), ids.sort(1).values)
    by_number = Permutation.of_ids(sorted_ids(chosen, TOPK), EXPERTS)
    return [by_number, Permutation.of_map(chosen), Permutation.of_ids(ids, EXPERTS)]


def test_rows_and_weights_are_those_of_megatron(ids: Tensor) -> None:
    rows, probs = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, EXPERTS)
    theirs, weights, *_ = moe_utils.permute(rows, as_map(ids), probs, num_out_tokens=TOKENS * TOPK)
    for permutation in permutations(ids):
        assert torch.equal(permutation.spread(rows), theirs)
        for ours, expected in zip(
            permutation.spread_with(rows, probs), (theirs, weights), strict=True
        ):
            assert torch.equal(ours, expected)


def test_sums_by_number_are_megatrons_to_the_bit(ids: Tensor) -> None:
    rows = torch.randn(TOKENS * TOPK, HIDDEN)
    given = torch.randn(TOKENS, HIDDEN)
    tokens = moe_utils.permute(given, as_map(ids), num_out_tokens=TOKENS * TOPK)[2]
    theirs = moe_utils.unpermute(rows, tokens, torch.Size((TOKENS, HIDDEN)))
    by_number, of_map, by_route = (p.add_up(rows) for p in permutations(ids))
    assert torch.equal(by_number, theirs)
    assert torch.equal(of_map, theirs)
    assert not torch.equal(by_route, theirs)  # the same rows in another order
    assert torch.allclose(by_route, theirs, atol=1e-6)


def test_sums_by_route_are_those_of_a_loop_over_the_route(ids: Tensor) -> None:
    rows = torch.randn(TOKENS * TOPK, HIDDEN)
    by_route = permutations(ids)[2]
    place = {
        (int(token), int(cell) % EXPERTS): row
        for row, (token, cell) in enumerate(zip(by_route.tokens, by_route.cells, strict=True))
    }
    expected = torch.stack([
        sum((rows[place[t, int(e)]] for e in ids[t, 1:]), rows[place[t, int(ids[t, 0])]])
        for t in range(TOKENS)
    ])  # fmt: skip
    assert torch.equal(by_route.add_up(rows), expected)


def test_half_precision_is_summed_in_fp32(ids: Tensor) -> None:
    rows = torch.randn(TOKENS * TOPK, HIDDEN).bfloat16()
    for permutation in permutations(ids):
        expected = permutation.add_up(rows.float()).bfloat16()
        assert torch.equal(permutation.add_up(rows), expected)


def test_gradients(ids: Tensor) -> None:
    back = torch.randperm(TOKENS)
    for permutation in permutations(ids):
        rows = torch.randn(TOKENS, 2, dtype=torch.float64, requires_grad=True)
        copies = torch.randn(TOKENS * TOPK, 2, dtype=torch.float64, requires_grad=True)
        table = torch.rand(TOKENS, EXPERTS, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(permutation.spread, (rows,))
        assert torch.autograd.gradcheck(permutation.add_up, (copies,))
        assert torch.autograd.gradcheck(permutation.spread_with, (rows, table))
        order = inverse(back).int(), back.int()
        assert torch.autograd.gradcheck(lambda x, order=order: reorder(x, *order), (rows,))


@pytest.mark.parametrize("chosen", [torch.zeros(5, 4, dtype=torch.bool), torch.ones(0, 4).bool()])
def test_tokens_without_experts_and_no_tokens(chosen: Tensor) -> None:
    permutation = Permutation.of_map(chosen)
    rows = torch.randn(len(chosen), HIDDEN, requires_grad=True)
    assert permutation.spread(rows).shape == (0, HIDDEN)
    total = permutation.add_up(permutation.spread(rows))
    assert torch.equal(total, torch.zeros(len(chosen), HIDDEN))
    total.sum().backward()
    assert rows.grad is not None
    assert not rows.grad.any()


def test_some_tokens_have_no_expert_on_this_rank(ids: Tensor) -> None:
    """Expert parallelism with the all-gather dispatcher: each rank adds up what it has."""
    chosen, rows = as_map(ids), torch.randn(TOKENS * TOPK, HIDDEN)
    permutation = Permutation.of_map(chosen[:, 2:4])
    own = rows[: len(permutation.tokens)]
    expected = torch.zeros(TOKENS, HIDDEN).index_add_(0, permutation.tokens, own)
    assert torch.equal(permutation.add_up(own), expected)
    assert (expected == 0).all(1).any()


def test_a_full_map_is_the_map_of_any_numbers(ids: Tensor) -> None:
    chosen = as_map(ids)
    full, any_number = Permutation.of_full_map(chosen, TOPK), Permutation.of_map(chosen, TOPK)
    for one, other in zip(full.order, any_number.order, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(full.counts, chosen.sum(0))
    with pytest.raises(ValueError, match=r"chosen: got more than 2 experts of token 0"):
        Permutation.of_full_map(chosen, 2)
    chosen[5] = False
    with pytest.raises(ValueError, match=r"ids: got 108 choices, expected 111"):
        Permutation.of_full_map(chosen, TOPK)


def test_received_rows_are_sorted_by_expert_and_back() -> None:
    experts = torch.tensor([2, 2, 0, 1, 1, 2, 0, 0])  # of three ranks, one after the other
    rows, values = torch.randn(8, HIDDEN, requires_grad=True), torch.rand(8, requires_grad=True)
    order, back = by_expert(experts, 3)
    assert torch.equal(order.long(), experts.argsort(stable=True))
    assert torch.equal(back.long(), inverse(order.long()))
    sorted_rows, sorted_values = reorder_with(rows, values, order, back)
    assert torch.equal(sorted_rows, rows[order])
    assert torch.equal(sorted_values, values[order])
    assert torch.equal(reorder(sorted_rows, back, order), rows)
    weights = torch.randn(8, HIDDEN)
    total = (sorted_rows * weights).sum() + (sorted_values * weights[:, 0]).sum()
    to_rows, to_values = torch.autograd.grad(total, (rows, values))
    assert torch.equal(to_rows, weights[back])
    assert torch.equal(to_values, weights[back, 0])
