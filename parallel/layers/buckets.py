"""Blocks of a packed batch's sequences, sorted into buckets of similar length.

Dimensions: as in `parallel.layers.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel.context import Block


@dataclass
class Bucket:
    """Blocks of similar length, which are adjacent in the layout, and the indices of their keys."""

    shape: tuple[int, int]
    """(b, s): the number of blocks and the length of the longest block."""
    keys: Tensor | None
    """i64[b, k]: indices into the gathered keys; None if each block is a whole sequence, whose keys
    are those of its own tokens."""
    mask: Tensor | None
    """bool[b, 1, s, k]: true where a query sees a key; None if plain causal attention suffices."""
    windows: dict[int, Tensor] = field(default_factory=dict)
    """`parallel.layers.sinks` keeps the masks of windows here, by the length of the window; those of
    chunks by the negative length."""


@dataclass
class Layout:
    """The concatenated padded blocks of all buckets: P positions for n tokens, n <= P < 2 n."""

    source: Tensor
    """i64[P]: the index of the token at each position; padding repeats the block's last token."""
    places: Tensor
    """i64[n]: the position of each token among the P positions."""
    is_identity: bool
    """Whether no block is padded and no token changes its position."""

    def lay_out(self, x: Tensor) -> Tensor:
        """Copy tokens [n, h, d] to their positions in the padded blocks [P, h, d]."""
        return x if self.is_identity else _LayOut.apply(x, self.source, self.places)

    def take_back(self, x: Tensor) -> Tensor:
        """Take the tokens [n, h, d] out of the padded blocks [P, h, d]."""
        return x if self.is_identity else _TakeBack.apply(x, self.places)


class _LayOut(torch.autograd.Function):
    """Copies tokens to their padded positions.

    A padding position repeats a token, but its output is never used, so it adds no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


class _TakeBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_positions = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        (places,) = ctx.saved_tensors
        zeros = grad.new_zeros(ctx.num_positions, *grad.shape[1:])
        return zeros.index_copy_(0, places, grad), None


def _columns(blocks: list[Block]) -> tuple[Tensor, Tensor, Tensor]:
    """Return `local_start`, `num_tokens` and `offset` of each block, as three tensors i64[b, 1]."""
    rows = [(block.local_start, block.num_tokens, block.offset) for block in blocks]
    start, length, offset = torch.tensor(rows).unsqueeze(2).unbind(1)
    return start, length, offset


def lay_out(buckets: list[list[Block]], device: torch.device) -> Layout:
    """Lay out all buckets in the order in which `PackedAttention` processes them."""
    sources, real = [], []
    for blocks in buckets:
        start, length, _ = _columns(blocks)
        step = torch.arange(int(length.max())).unsqueeze(0)
        sources.append((start + torch.minimum(step, length - 1)).flatten())
        real.append((step < length).flatten())
    source = torch.cat(sources)
    (positions,) = torch.cat(real).nonzero(as_tuple=True)
    places = torch.empty_like(positions).scatter_(0, source[positions], positions)
    is_identity = torch.equal(source, torch.arange(len(places)))
    return Layout(source.to(device), places.to(device), is_identity)


def bucket_of(blocks: list[Block], places: Tensor | None, device: torch.device) -> Bucket:
    _, length, offset = _columns(blocks)
    shape = len(blocks), int(length.max())
    if places is None:  # whole sequences
        return Bucket(shape, None, None)
    step = torch.arange(shape[1]).unsqueeze(0)
    key_step = torch.arange(int((offset + length).max())).unsqueeze(0)
    first = torch.tensor([[block.sequence_start] for block in blocks])
    keys = first + key_step.minimum(offset + length - 1)
    mask = None
    if bool(offset.any()):
        mask = (key_step.unsqueeze(1) <= (offset + step).unsqueeze(2)).unsqueeze(1).to(device)
    return Bucket(shape, places[keys.to(device)], mask)
