"""Context parallelism: which packed tokens a rank holds.

Every sequence is cut into 2 x cp chunks of equal length, and rank r holds chunks r and 2 cp - 1 - r:
an early one, whose tokens look back at little, and a late one, so that causal attention is the same
work on every rank. It is the order that Megatron's RoPE and TransformerEngine expect.

Attention gathers keys and values over the ranks (`parallel.layers.attention`); all else is per token.
Log-probs are gathered as well, 8 bytes a token: the loss is then computed on whole sequences, as
without context parallelism, and every rank takes the gradient of its own tokens.

N packed tokens, n = N / cp of them on this rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from mrl.types import PackedRoutes


@dataclass(frozen=True)
class Block:
    """Consecutive tokens of one sequence that lie together on this rank."""

    local_start: int
    """First of this rank's n tokens."""
    num_tokens: int
    sequence_start: int
    """First packed token of the sequence."""
    offset: int
    """Tokens of the sequence before the block: all of them are keys for it."""

    @property
    def packed(self) -> Tensor:
        """i64[num_tokens]: the packed tokens of the block."""
        first = self.sequence_start + self.offset
        return torch.arange(first, first + self.num_tokens)


@dataclass(frozen=True)
class ContextSlice:
    """This rank's part of a micro-batch; the whole of it where there is no context parallelism."""

    group: ProcessGroup
    blocks: list[Block]
    index: Tensor | None = None
    """i64[n]: the packed tokens of this rank, in its order; None for all."""
    places: Tensor | None = None
    """i64[N]: where packed token t is when the slices of all ranks are laid end to end."""

    @property
    def packed(self) -> Tensor:
        """i64[n] on the CPU: the packed tokens of this rank, in its order."""
        parts = [block.packed for block in self.blocks]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def take(self, values: Tensor) -> Tensor:
        """Take this rank's tokens: [N, ...] -> [n, ...]."""
        return values if self.index is None else values[self.index]

    def take_routes(self, routes: PackedRoutes) -> PackedRoutes:
        weights = None if routes.weights is None else self.take(routes.weights)
        return dataclasses.replace(routes, packed=self.take(routes.packed), weights=weights)

    def gather(self, values: Tensor) -> Tensor:
        """Gather [n, ...] -> [N, ...] in packed order. The gradient of a rank is that of its own
        values: what follows must be computed by all ranks alike."""
        if self.places is None:
            return values
        joined = gather_from_sequence_parallel_region(
            values, tensor_parallel_output_grad=False, group=self.group
        )
        return joined[self.places]

    def gather_shared(self, values: Tensor) -> Tensor:
        """Gather [n, ...] -> [N, ...] in the order of `places`. The gradients of all ranks are summed:
        for what each rank uses in its own way."""
        if self.places is None:
            return values
        return gather_from_sequence_parallel_region(values, group=self.group)


def context_slice(cu_seqlens: Tensor, group: ProcessGroup, device: torch.device) -> ContextSlice:
    """Return this rank's slice, with tensors on `device`. `cu_seqlens` i32[B+1] is on the CPU, where
    reading it waits for nothing.

    Under context parallelism every length is a multiple of 2 cp.
    """
    bounds = cu_seqlens.tolist()
    if group.size() == 1:
        return ContextSlice(group, [Block(a, b - a, a, 0) for a, b in pairwise(bounds) if b > a])
    slices = [blocks_of_rank(bounds, rank, group.size()) for rank in range(group.size())]
    indices = [torch.cat([block.packed for block in blocks]) for blocks in slices]
    places = torch.cat(indices).argsort()
    rank = group.rank()
    return ContextSlice(group, slices[rank], indices[rank].to(device), places.to(device))


def blocks_of_rank(bounds: Sequence[int], rank: int, size: int) -> list[Block]:
    """The blocks of context-parallel `rank` of `size`, of sequences [bounds[i], bounds[i+1]).

    Raises ValueError for a length that is no multiple of 2 `size`.
    """
    blocks, local = [], 0
    for a, b in pairwise(bounds):
        chunk, rest = divmod(b - a, 2 * size)
        if rest:
            raise ValueError(
                f"context parallel size {size}: a packed sequence has {b - a} tokens, expected a "
                f"multiple of {2 * size}; pack with that sequence_multiple"
            )
        for number in (rank, 2 * size - 1 - rank) if chunk else ():
            blocks.append(Block(local, chunk, a, number * chunk))
            local += chunk
    return blocks
