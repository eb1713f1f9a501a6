"""Pure functions that join Hugging Face tensors to one parameter and split it over ranks.

`join` makes the whole Megatron tensor from its HF tensors, and `split` is the inverse. `take_shard`
takes one tensor-parallel shard of the whole tensor. A `kind` is a
`parallel.architectures.base.Split`.

`boxes` locates a rank's piece in the whole tensor, by shapes alone. A distributed optimizer holds a
range of a shard's elements in row-major order. Such a range consists of a few rectangles of the
whole tensor, each consecutive in the flattened shard. Checkpoints store rectangles, so that any
other layout can read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.architectures.base import Split


def join(parts: list[Tensor], kind: Split, num_groups: int) -> Tensor:
    """Join the HF tensors of one parameter to the whole Megatron tensor."""
    if kind in ("qkv", "gated_qkv"):
        grouped = [p.unflatten(0, (num_groups, -1)) for p in parts]
        if kind == "gated_qkv":
            grouped[0] = gates_last(grouped[0], grouped[1].shape[1], 1)
        return torch.cat(grouped, dim=1).flatten(0, 1)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def gates_last(queries: Tensor, size: int, dim: int) -> Tensor:
    """Reorder dimension `dim` of a group's queries: from the query and the gate of each head, with
    `size` elements each, to the queries of all heads and then their gates."""
    heads = queries.unflatten(dim, (-1, 2, size))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)


def split(full: Tensor, kind: Split, num_groups: int, heads_per_group: int) -> list[Tensor]:
    """Split the whole Megatron tensor into its HF tensors: the inverse of `join`."""
    if kind == "gated":
        return list(full.chunk(2))
    if kind == "gated_qkv":
        heads = full.unflatten(0, (num_groups, 2 * heads_per_group + 2, -1))
        queries, gates, key, value = heads.split([heads_per_group] * 2 + [1, 1], dim=1)
        both = torch.stack([queries, gates], dim=2)
        return [both.flatten(0, 3), key.flatten(0, 2), value.flatten(0, 2)]
    if kind != "qkv":
        return [full]
    grouped = full.unflatten(0, (num_groups, heads_per_group + 2, -1))
    parts = grouped.split([heads_per_group, 1, 1], dim=1)
    return [p.flatten(0, 2).contiguous() for p in parts]


def take_shard(full: Tensor, kind: Split, rank: int, size: int) -> Tensor:
    """Return the part of a whole Megatron tensor that tensor-parallel `rank` of `size` holds."""
    if size == 1 or kind == "none":
        return full
    if kind == "gated":
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, dim=1 if kind == "columns" else 0)[rank]


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangle of the whole tensor whose elements are consecutive in the flattened shard."""

    start: int
    """Index of the rectangle's first element in the flattened shard."""
    shape: Shape
    offset: Shape
    """Indices of the rectangle's first element in the whole tensor."""


def whole_shape(kind: Split, shape: Shape, size: int) -> Shape:
    """Return the shape of the whole tensor if each of `size` tensor-parallel ranks holds a shard of
    `shape`."""
    if size == 1 or kind == "none":
        return shape
    axis = 1 if kind == "columns" else 0
    return (*shape[:axis], shape[axis] * size, *shape[axis + 1 :])


def boxes(
    kind: Split, shape: Shape, rank: int, size: int, start: int = 0, stop: int | None = None
) -> list[Box]:
    """Return the rectangles that make up the elements [start, stop) of the flattened shard of
    tensor-parallel `rank` among `size`. By default these are all elements of the shard.

    For each block of rows there are at most `2 * dims - 1` rectangles, because the range may begin
    and end inside a row.
    """
    stop = math.prod(shape) if stop is None else stop
    row = math.prod(shape[1:])
    found = []
    for first, num_rows, corner in _blocks(kind, shape, rank, size):
        begin, end = first * row, (first + num_rows) * row
        low, high = max(start, begin), min(stop, end)
        if low < high:
            found += _cut((num_rows, *shape[1:]), corner, begin, low - begin, high - begin)
    return found


def _blocks(kind: Split, shape: Shape, rank: int, size: int) -> Iterator[tuple[int, int, Shape]]:
    """Yield (first row in the shard, number of rows, offset in the whole tensor) for each block of
    rows that is contiguous in both the shard and the whole tensor."""
    origin = (0,) * len(shape)
    if size == 1 or kind == "none":
        yield 0, shape[0], origin
    elif kind == "gated":  # [gate; up], each split by rows
        half = shape[0] // 2
        for block in range(2):
            yield block * half, half, ((block * size + rank) * half, *origin[1:])
    elif kind == "columns":
        yield 0, shape[0], (0, rank * shape[1], *origin[2:])
    else:
        yield 0, shape[0], (rank * shape[0], *origin[1:])


def _cut(shape: Shape, corner: Shape, base: int, low: int, high: int) -> Iterator[Box]:
    """Yield the rectangles that make up the elements [low, high) of a block of the shape `shape`.
    The block begins at element `base` of the flattened shard, and at the indices `corner` of the
    whole tensor."""
    if len(shape) == 1:
        yield Box(base + low, (high - low,), (corner[0] + low,))
        return
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row  # whole rows
    ends = [(low // row, low % row, min(row, high - low // row * row))] if low % row else []
    if last >= first and high % row:
        ends.append((last, 0, high % row))
    for number, begin, end in ends:
        for part in _cut(shape[1:], corner[1:], base + number * row, begin, end):
            yield Box(part.start, (1, *part.shape), (corner[0] + number, *part.offset))
    if first < last:
        yield Box(base + first * row, (last - first, *shape[1:]), (corner[0] + first, *corner[1:]))
