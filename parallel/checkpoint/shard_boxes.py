"""Finds the place of a rank's piece of a parameter in the whole tensor, by shapes, without torch.

A tensor-parallel rank holds a shard (`parallel.shards.take_shard`), and a distributed optimizer holds
a range of that shard's elements in row-major order. Both are a few rectangles, each one consecutive in
the flattened shard; a checkpoint stores rectangles, so that any other layout can cut them differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from parallel.architectures.base import Split

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box is one rectangle of the whole tensor; row-major and consecutive in the flattened shard."""

    start: int
    """Number of its first element in the flattened shard."""
    shape: Shape
    offset: Shape
    """Its first corner in the whole tensor."""


def whole_shape(kind: Split, shape: Shape, size: int) -> Shape:
    """The shape of the whole tensor of which `size` tensor-parallel ranks hold shards of `shape`."""
    if size == 1 or kind == "none":
        return shape
    axis = 1 if kind == "columns" else 0
    return (*shape[:axis], shape[axis] * size, *shape[axis + 1 :])


def boxes(
    kind: Split, shape: Shape, rank: int, size: int, start: int = 0, stop: int | None = None
) -> list[Box]:
    """The rectangles of elements [start, stop) of the flattened shard of `rank` among `size`.

    At most 2 * dims - 1 for every block of rows: a range begins and ends in the middle of a row.
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
    """(first row in the shard, rows, corner in the whole tensor) of what lies together in both."""
    origin = (0,) * len(shape)
    if size == 1 or kind == "none":
        yield 0, shape[0], origin
    elif kind == "gated":  # [gate; up], each shared out by rows
        half = shape[0] // 2
        for block in range(2):
            yield block * half, half, ((block * size + rank) * half, *origin[1:])
    elif kind == "columns":
        yield 0, shape[0], (0, rank * shape[1], *origin[2:])
    else:
        yield 0, shape[0], (rank * shape[0], *origin[1:])


def _cut(shape: Shape, corner: Shape, base: int, low: int, high: int) -> Iterator[Box]:
    """Elements [low, high) of a block that begins at element `base` of the flattened shard."""
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
