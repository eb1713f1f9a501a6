"""The rectangles of all ranks are the whole tensor, every element once, with the right values."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.architectures.base import Split
from parallel.shards import boxes, take_shard, whole_shape

KINDS: tuple[Split, ...] = ("none", "rows", "columns", "gated", "qkv", "gated_qkv")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Split, tuple[int, ...], int, list[int]]:
    """(kind, shape of a shard, tensor-parallel size, cuts of the flattened shard)."""
    kind = draw(st.sampled_from(KINDS))
    num_dims = draw(st.integers(2 if kind == "columns" else 1, 3))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(num_dims))
    if kind == "gated":
        shape = (2 * shape[0], *shape[1:])
    size = 1 if kind == "none" else draw(st.integers(1, 4))
    cuts = draw(st.lists(st.integers(0, math.prod(shape)), max_size=5))
    return kind, shape, size, sorted({0, math.prod(shape), *cuts})


@given(cases())
@settings(max_examples=300, deadline=None)
def test_boxes_tile_the_whole_tensor(case: tuple) -> None:
    kind, shape, size, cuts = case
    whole = whole_shape(kind, shape, size)
    full = torch.arange(math.prod(whole)).view(whole)
    seen = torch.zeros(whole, dtype=torch.int)
    for rank in range(size):
        flat = take_shard(full, kind, rank, size).reshape(-1)
        assert flat.numel() == math.prod(shape)
        for start, stop in pairwise(cuts):
            parts = boxes(kind, shape, rank, size, start, stop)
            num_blocks = 2 if kind == "gated" else 1
            assert len(parts) <= num_blocks * (2 * len(shape) - 1)
            assert sum(math.prod(part.shape) for part in parts) == stop - start
            for part in parts:
                assert start <= part.start < part.start + math.prod(part.shape) <= stop
                place = tuple(
                    slice(low, low + n) for low, n in zip(part.offset, part.shape, strict=True)
                )
                seen[place] += 1
                mine = flat[part.start : part.start + math.prod(part.shape)].view(part.shape)
                assert torch.equal(full[place], mine)
    assert (seen == 1).all()


def test_a_whole_shard_is_one_box_and_a_gated_one_two() -> None:
    assert [b.shape for b in boxes("rows", (4, 3), 1, 2)] == [(4, 3)]
    assert [b.offset for b in boxes("gated", (4, 3), 1, 2)] == [(2, 0), (6, 0)]
