"""Which rows of a packed micro-batch a rank computes. Context parallelism divides the rows over the
ranks, and sequences may share the rows of a common prefix.

Under context parallelism every sequence is cut into `2 * cp` chunks of equal length. Rank r holds
chunk r, whose tokens attend to few keys, and chunk `2 * cp - 1 - r`, whose tokens attend to many
keys, so that causal attention costs every rank the same. Megatron's RoPE and TransformerEngine expect
this order.

Attention gathers keys and values over the ranks (`parallel.layers.attention`); everything else
works on single tokens. Log-probs are gathered too, at 8 bytes per token, so the loss is computed on
whole sequences as without context parallelism. In the backward pass every rank takes the gradient
of its own tokens.

A sequence may share its first rows with another sequence (`mrl.shared_prefixes`). Then only its
remaining rows are cut into chunks. Several packed tokens have the same shared row: the row is
computed once, and the result is copied to all of these tokens. In the backward pass the row gets
the sum of the tokens' gradients.

Dimensions: N packed tokens, R <= N rows that are computed for them (R = N if nothing is shared), n
= R / cp rows on this rank.
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

from moe.align import take_bytes
from mrl.shared_prefixes import SharedPrefixes, num_blocks
from mrl.types import TokenRoutes


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one sequence that are adjacent on this rank."""

    local_start: int
    """Index of the block's first row among this rank's n rows."""
    num_tokens: int
    sequence_start: int
    """Index of the sequence's first token among the N packed tokens."""
    offset: int
    """The number of tokens of the sequence that come before the block. The block's queries attend
    to all of these tokens."""

    @property
    def packed(self) -> Tensor:
        """i64[num_tokens]: indices of the block's tokens among the N packed tokens."""
        first = self.sequence_start + self.offset
        return torch.arange(first, first + self.num_tokens)


@dataclass(frozen=True)
class ContextSlice:
    """This rank's part of a micro-batch; the whole micro-batch without context parallelism."""

    group: ProcessGroup
    blocks: list[Block]
    index: Tensor | None = None
    """i64[n]: for each row of this rank, in this rank's order, the index of its token among the N
    packed tokens. For a shared row it is the token of the sequence that computes the row. None if
    the rank's n rows are the N packed tokens in their order."""
    places: Tensor | None = None
    """i64[N]: entry t is the position of the row of packed token t in the concatenated slices of all
    ranks; None if `index` is None."""
    shared_places: Tensor | None = None
    """`places` on the CPU if sequences share rows; otherwise None."""

    @property
    def packed(self) -> Tensor:
        """i64[n] on the CPU: the values of `index`, or 0 to n - 1 if `index` is None."""
        parts = [block.packed for block in self.blocks]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def take(self, values: Tensor) -> Tensor:
        """Select this rank's rows: [N, ...] -> [n, ...]."""
        return values if self.index is None else values[self.index]

    def take_any(self, flags: Tensor) -> Tensor:
        """Return bool[n]: for each row of this rank, whether `flags`, bool[N], is true for any of
        the row's tokens.

        `flags` may be on the CPU.
        """
        if self.shared_places is None:
            index = self.index if flags.is_cuda or self.index is None else self.packed
            return flags if index is None else flags[index]
        places = self.places if flags.is_cuda else self.shared_places
        assert places is not None
        num_rows = self.num_rows
        counts = torch.zeros(num_rows * self.group.size(), dtype=torch.int32, device=flags.device)
        counts = counts.index_add_(0, places, flags.int())
        return counts.split(num_rows)[self.group.rank()] > 0

    @property
    def num_rows(self) -> int:
        """n, the number of this rank's rows."""
        return sum(block.num_tokens for block in self.blocks)

    def tokens_of_rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return two tensors i64[m]: the indices of the m packed tokens whose row is in the slice
        `rows` of this rank's rows, and for each of these tokens the index of its row within the
        slice.

        Only for a micro-batch in which sequences share rows.
        """
        assert self.shared_places is not None
        first = self.group.rank() * self.num_rows + rows.start
        source = self.shared_places - first
        (packed,) = ((source >= 0) & (source < rows.stop - rows.start)).nonzero(as_tuple=True)
        return packed, source[packed]

    def take_routes(self, routes: TokenRoutes) -> TokenRoutes:
        if self.index is None:
            return routes
        weights = None if routes.weights is None else self.take(routes.weights)
        return dataclasses.replace(
            routes,
            expert_ids=take_bytes(routes.expert_ids, self.index),
            captured=self.take(routes.captured),
            weights=weights,
        )

    def gather(self, values: Tensor) -> Tensor:
        """Gather `values` [n, ...] of all ranks; return [N, ...] in packed order. Tokens that share a
        row get the same value.

        The backward pass takes this rank's part of the gradient without a sum over ranks, so all
        ranks must use the result in the same way.
        """
        if self.places is None:
            return values
        joined = gather_from_sequence_parallel_region(
            values, tensor_parallel_output_grad=False, group=self.group
        )
        return joined[self.places]

    def gather_shared(self, values: Tensor) -> Tensor:
        """Gather `values` [n, ...] of all ranks; return them [R, ...], concatenated in rank order.
        `places` holds the index of each packed token in the result.

        The backward pass sums the gradients of all ranks, so each rank may use the result in its
        own way.
        """
        if self.places is None:
            return values
        return gather_from_sequence_parallel_region(values, group=self.group)


def context_slice(
    cu_seqlens: Tensor,
    group: ProcessGroup,
    device: torch.device,
    shared: SharedPrefixes | None = None,
) -> ContextSlice:
    """Return this rank's slice of the sequences `cu_seqlens` i32[B+1], with tensors on `device`.

    `cu_seqlens` is on the CPU, so that reading it does not wait for a GPU. Under context
    parallelism, raises ValueError for a sequence whose length, without the rows that it shares, is
    not a multiple of `2 * cp`.
    """
    bounds = cu_seqlens.tolist()
    size, rank = group.size(), group.rank()
    if size == 1 and shared is None:
        return ContextSlice(group, [Block(a, b - a, a, 0) for a, b in pairwise(bounds) if b > a])
    offsets = shared.num_rows if shared else (0,) * (len(bounds) - 1)
    if size == 1:
        slices = [_suffixes(bounds, offsets)]
    else:
        slices = [blocks_of_rank(bounds, each, size, offsets) for each in range(size)]
    indices = [torch.cat([block.packed for block in blocks]) for blocks in slices]
    joined = torch.cat(indices)
    places = torch.empty(bounds[-1], dtype=torch.int64)
    places[joined] = torch.arange(len(joined))
    if shared is not None:
        for a, leader, count in zip(bounds, shared.leaders, shared.num_rows, strict=False):
            places[a : a + count] = places[bounds[leader] : bounds[leader] + count].clone()
    return ContextSlice(
        group,
        slices[rank],
        indices[rank].to(device),
        places.to(device),
        shared_places=None if shared is None else places,
    )


def _suffixes(bounds: Sequence[int], offsets: Sequence[int]) -> list[Block]:
    """Cut sequences into blocks. Sequence i has the packed tokens [bounds[i], bounds[i+1]); its
    first `offsets[i]` rows are shared and belong to no block. A sequence that shares no rows is one
    block."""
    blocks, local = [], 0
    for (a, b), offset in zip(pairwise(bounds), offsets, strict=True):
        num_rows = b - a - offset
        count = num_blocks(num_rows) if offset else 1
        ends = [offset + num_rows * (i + 1) // count for i in range(count)]
        for start, end in pairwise([offset, *ends]):
            if end > start:
                blocks.append(Block(local, end - start, a, start))
                local += end - start
    return blocks


def blocks_of_rank(
    bounds: Sequence[int], rank: int, size: int, offsets: Sequence[int] = ()
) -> list[Block]:
    """Return the blocks that context-parallel rank `rank` of `size` holds. Sequence i has the
    packed tokens [bounds[i], bounds[i+1]); its first `offsets[i]` rows are shared and belong to no
    block.

    Raises ValueError for a sequence whose remaining length is not a multiple of `2 * size`.
    """
    offsets = offsets or (0,) * (len(bounds) - 1)
    blocks, local = [], 0
    for (a, b), offset in zip(pairwise(bounds), offsets, strict=True):
        chunk, rest = divmod(b - a - offset, 2 * size)
        if rest:
            raise ValueError(
                f"context parallel size {size}: a packed sequence has {b - a - offset} tokens, "
                f"expected a multiple of {2 * size}; pack with that sequence_multiple"
            )
        for number in (rank, 2 * size - 1 - rank) if chunk else ():
            blocks.append(Block(local, chunk, a, offset + number * chunk))
            local += chunk
    return blocks
