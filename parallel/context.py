"""Context parallelism: which packed tokens a rank holds.

Every sequence is cut into `2 * cp` chunks of equal length. Rank r holds chunk r, whose tokens
attend to few keys, and chunk `2 * cp - 1 - r`, whose tokens attend to many keys, so that causal
attention costs every rank the same. Megatron's RoPE and TransformerEngine expect this order.

Attention gathers keys and values over the ranks (`parallel.layers.attention`); everything else
works on single tokens. Log-probs are gathered too, at 8 bytes per token, so the loss is computed on
whole sequences as without context parallelism. In the backward pass every rank takes the gradient
of its own tokens.

Dimensions: N packed tokens, n = N / cp of them on this rank.
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
from mrl.types import TokenRoutes


@dataclass(frozen=True)
class Block:
    """Consecutive tokens of one sequence that are adjacent on this rank."""

    local_start: int
    """Index of the block's first token among this rank's n tokens."""
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
    """i64[n]: indices, among the N packed tokens, of this rank's tokens in this rank's order. None
    without context parallelism, where the rank has all tokens."""
    places: Tensor | None = None
    """i64[N]: entry t is the position of packed token t in the concatenated slices of all ranks; None
    without context parallelism."""

    @property
    def packed(self) -> Tensor:
        """i64[n] on the CPU: indices, among the N packed tokens, of this rank's tokens in its order."""
        parts = [block.packed for block in self.blocks]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def take(self, values: Tensor) -> Tensor:
        """Select this rank's tokens: [N, ...] -> [n, ...]."""
        return values if self.index is None else values[self.index]

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
        """Gather `values` [n, ...] of all ranks; return [N, ...] in packed order.

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
        """Gather `values` [n, ...] of all ranks; return the concatenated slices of the ranks
        [N, ...]. `places` holds the index of each packed token in the result.

        The backward pass sums the gradients of all ranks, so each rank may use the result in its
        own way.
        """
        if self.places is None:
            return values
        return gather_from_sequence_parallel_region(values, group=self.group)


def context_slice(cu_seqlens: Tensor, group: ProcessGroup, device: torch.device) -> ContextSlice:
    """Return this rank's slice of the sequences `cu_seqlens` i32[B+1], with tensors on `device`.

    `cu_seqlens` is on the CPU, so that reading it does not wait for a GPU. Under context
    parallelism, raises ValueError for a sequence whose length is not a multiple of `2 * cp`.
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
    """Return the blocks that context-parallel rank `rank` of `size` holds of the sequences
    [bounds[i], bounds[i+1]).

    Raises ValueError for a sequence whose length is not a multiple of `2 * size`.
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
