"""Rows of bytes that carry routes between ranks: round trips bit for bit, and their size."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.align import split_rows
from moe.route_rows import from_rows, id_dtype, route_bytes, row_bytes, to_rows
from mrl.types import TokenRoutes


def make_routes(rows: int, layers: int, experts: int, topk: int, seed: int = 0) -> TokenRoutes:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, layers, experts, generator=generator).topk(topk).indices
    captured = torch.ones(rows, dtype=torch.bool)
    return TokenRoutes(ids.to(id_dtype(experts)), captured, tuple(range(1, layers + 1)), experts)


@given(
    rows=st.integers(0, 9),
    layers=st.integers(0, 5),
    experts=st.sampled_from([1, 2, 3, 8, 60, 64, 128, 255, 256, 257, 512]),
    topk=st.integers(1, 10),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_round_trip(rows: int, layers: int, experts: int, topk: int, seed: int) -> None:
    routes = make_routes(rows, layers, experts, min(topk, experts), seed)
    topk = min(topk, experts)
    moved = to_rows(routes)
    assert moved.shape == (rows, row_bytes(layers, experts, topk))
    back = from_rows(moved, routes.layer_numbers, experts, topk)
    assert torch.equal(back.expert_ids, routes.expert_ids)
    assert back.layer_numbers == routes.layer_numbers


@pytest.mark.parametrize("rows", [1, 5])
def test_weights_travel_with_their_ids(rows: int) -> None:
    """The row has 3 bytes of ids, so its weights begin at an offset that no float may have."""
    bare = make_routes(rows, 3, 8, 1)
    routes = dataclasses.replace(bare, weights=torch.rand(rows, 3, 1))
    moved = to_rows(routes)
    assert moved.shape == (rows, row_bytes(3, 8, 1, with_weights=True))
    assert moved.shape[1] == to_rows(bare).shape[1] + 3 * 1 * 4
    back = from_rows(moved, routes.layer_numbers, 8, 1, with_weights=True)
    assert torch.equal(back.expert_ids, routes.expert_ids)
    assert back.weights is not None
    assert routes.weights is not None
    assert torch.equal(back.weights, routes.weights)
    first, second = split_rows(back, [rows // 2, rows - rows // 2])
    assert torch.equal(torch.cat([first.weights, second.weights]), routes.weights)
    with pytest.raises(ValueError, match="of 8 experts with weights, got shape"):
        from_rows(to_rows(bare), routes.layer_numbers, 8, 1, with_weights=True)


def test_layout_by_hand() -> None:
    """One layer after the other; two bytes an id, the lower one first, above 256 experts."""
    ids, captured = torch.tensor([[[5, 1], [6, 2]]]), torch.ones(1, dtype=torch.bool)
    for experts, expected in ((8, [5, 1, 6, 2]), (300, [5, 0, 1, 0, 6, 0, 2, 0])):
        routes = TokenRoutes(ids.to(id_dtype(experts)), captured, (1, 2), experts)
        assert to_rows(routes).tolist() == [expected]


def test_two_bytes_hold_the_largest_id() -> None:
    ids = torch.tensor([[[65535, 0, 256]]]).to(torch.uint16)
    routes = TokenRoutes(ids, torch.ones(1, dtype=torch.bool), (1,), 65536)
    back = from_rows(to_rows(routes), (1,), 65536, 3)
    assert back.expert_ids.tolist() == [[[65535, 0, 256]]]
    assert back.captured.all()


@pytest.mark.parametrize(
    ("experts", "topk", "size"),
    [(8, 2, 2), (128, 8, 8), (256, 8, 8), (257, 8, 16), (512, 10, 20), (1, 1, 1), (65536, 4, 8)],
)
def test_route_bytes(experts: int, topk: int, size: int) -> None:
    assert route_bytes(experts, topk) == size


@pytest.mark.parametrize("experts", [0, 65537])
def test_more_experts_than_two_bytes_hold_are_refused(experts: int) -> None:
    with pytest.raises(ValueError, match=f"num_experts: got {experts}, expected 1 to 65536"):
        id_dtype(experts)


def test_rows_of_another_size_are_refused() -> None:
    moved = to_rows(make_routes(4, 4, 8, 2))
    with pytest.raises(
        ValueError, match="expected 10 bytes a row for 5 layers x top-2 of 8 experts"
    ):
        from_rows(moved, (1, 2, 3, 4, 5), 8, 2)
