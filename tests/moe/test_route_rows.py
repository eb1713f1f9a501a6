"""Rows of bytes that carry routes between ranks: round trips bit for bit, and their size."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.align import split_rows
from moe.route_rows import from_rows, row_bytes, to_rows
from mrl.kernels.routes import native_routes, pack_routes
from mrl.types import PackedRoutes


def make_routes(rows: int, layers: int, experts: int, topk: int, seed: int = 0) -> PackedRoutes:
    """Some rows are native."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, layers, experts, generator=generator).topk(topk).indices
    packed = pack_routes(ids, experts)
    packed[::5] = native_routes(1, layers, experts, topk)
    return PackedRoutes(packed, tuple(range(1, layers + 1)), experts, topk)


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
    moved = to_rows(routes)
    assert moved.shape == (rows, row_bytes(layers, experts, routes.topk))
    back = from_rows(moved, routes.layer_numbers, experts, routes.topk)
    assert torch.equal(back.packed, routes.packed)
    assert (back.layer_numbers, back.topk) == (routes.layer_numbers, routes.topk)


@pytest.mark.parametrize("rows", [1, 5])
def test_weights_travel_with_their_ids(rows: int) -> None:
    """The row has 3 bytes of ids, so its weights begin at an offset that no float may have."""
    bare = make_routes(rows, 3, 8, 2)
    routes = dataclasses.replace(bare, weights=torch.rand(rows, 3, 2))
    moved = to_rows(routes)
    assert moved.shape == (rows, row_bytes(3, 8, 2, with_weights=True))
    assert moved.shape[1] == to_rows(bare).shape[1] + 3 * 2 * 4
    back = from_rows(moved, routes.layer_numbers, 8, 2, with_weights=True)
    assert torch.equal(back.packed, routes.packed)
    assert back.weights is not None
    assert routes.weights is not None
    assert torch.equal(back.weights, routes.weights)
    first, second = split_rows(back, [rows // 2, rows - rows // 2])
    assert torch.equal(torch.cat([first.weights, second.weights]), routes.weights)
    with pytest.raises(ValueError, match="of 8 experts with weights, got shape"):
        from_rows(to_rows(bare), routes.layer_numbers, 8, 2, with_weights=True)


def test_layout_by_hand() -> None:
    # Each layer has a byte for 2 ids of 3 bits: (5, 1) is 5 | 1 << 3, (6, 2) is 6 | 2 << 3.
    packed = pack_routes(torch.tensor([[[5, 1], [6, 2]]]), 8)
    assert to_rows(PackedRoutes(packed, (1, 2), 8, 2)).tolist() == [[0b1101, 0b10110]]


SHAPES = [
    # Layers, top-k, experts of Qwen3-30B-A3B, DeepSeek-V3, Kimi-K2, Qwen1.5-MoE, Qwen2-57B-A14B.
    *[(48, 8, 128), (58, 8, 256), (60, 8, 384), (24, 4, 60), (28, 8, 64)],
]


@pytest.mark.parametrize(("layers", "topk", "experts"), SHAPES)
def test_a_row_of_a_real_model_is_no_larger_than_its_bits(
    layers: int, topk: int, experts: int
) -> None:
    bits = layers * topk * math.ceil(math.log2(experts))
    assert row_bytes(layers, experts, topk) == math.ceil(bits / 8)
    assert to_rows(make_routes(6, layers, experts, topk)).nbytes == 6 * math.ceil(bits / 8)


def test_rows_of_another_size_are_refused() -> None:
    moved = to_rows(make_routes(4, 4, 8, 2))
    with pytest.raises(
        ValueError, match="expected 5 bytes a row for 5 layers x top-2 of 8 experts"
    ):
        from_rows(moved, (1, 2, 3, 4, 5), 8, 2)
