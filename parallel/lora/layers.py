"""Linear layers of Megatron with low-rank updates: `W x + scale B (A x)`, with W frozen.

The update is added to the layer's product, before the layer communicates its output. If the rows of
the layer's weight are split over ranks, each rank multiplies its own tokens by A, and the small
products `A x` are gathered. If the columns are split, each rank adds its part of the update before
the layer's usual sum over ranks.

Dimensions: r rank of the update, n tokens of a product, in and out sizes of this rank's part of the
layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from parallel.architectures.base import Split
from parallel.layers.experts import GroupedExperts, grouped_linear, join_parameters
from parallel.layers.latent_attention import ReplicatedLinear
from parallel.shards import gates_last, join


class Switch:
    """Turns all updates of a model off and on. With the updates off, the model computes the same as
    its base."""

    is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class LowRank(torch.nn.Module):
    """The matrices A [r, in] and B [out, r] of one Hugging Face weight. A matrix that the experts
    of a layer share is None here, because another module holds it."""

    A: torch.nn.Parameter | None
    B: torch.nn.Parameter | None


Pair = tuple[Tensor, Tensor]
"""The matrices A [r, in] and B [out, r] of one weight."""


class Update(torch.nn.Module):
    """The low-rank update of a linear layer. Megatron may have joined several Hugging Face weights
    in this layer."""

    split: Split

    def __init__(
        self, split: Split, sizes: Sequence[int], num_groups: int, scale: float, switch: Switch
    ) -> None:
        """Make an update without matrices.

        `split` says how ranks split the layer's weight. `sizes` are the numbers of rows that the
        layer's Hugging Face weights have on this rank. `num_groups` is the number of query groups on
        this rank. `scale` is the factor of `B A`.
        """
        super().__init__()
        self.split, self.sizes, self.num_groups = split, list(sizes), num_groups
        self.scale, self.switch = scale, switch
        self._parts: list[LowRank | None] = [None] * len(self.sizes)
        self._shared: list[tuple[LowRank | None]] = [(None,)] * len(self.sizes)

    def add(self, number: int, name: str, part: LowRank, shared: LowRank | None) -> None:
        """Add the matrices A and B of one weight, as the submodule `name`. `number` is the index of
        the weight among the Hugging Face weights that the layer joins.

        `shared` holds the matrices that the experts of the MoE layer share, and is a submodule of
        that layer.
        """
        self.add_module(name, part)
        self._parts[number] = part
        self._shared[number] = (shared,)  # in a tuple, so that it is not a child of this module

    def pairs(self) -> list[Pair | None]:
        """Return (A, B) for each Hugging Face weight of the layer; None for a weight that is not
        adapted."""
        return [
            None if part is None else (_of("A", part, shared), _of("B", part, shared))
            for part, (shared,) in zip(self._parts, self._shared, strict=True)
        ]

    def is_shared(self, number: int, matrix: str) -> bool:
        """Return whether the experts share `matrix` ("A" or "B") of the layer's weight with index
        `number`; False for a weight that is not adapted."""
        part = self._parts[number]
        return part is not None and getattr(part, matrix) is None

    def forward(self, x: Tensor, gather_over: Any = None) -> Tensor:
        """Compute the update [n, out] of x [n, in].

        If the layer gathers tokens, `gather_over` is the group of the ranks that have the tokens,
        and the result has the rows of all these ranks.
        """
        pairs = self.pairs()
        present = [pair for pair in pairs if pair is not None]
        low = F.linear(x, torch.cat([a for a, _ in present]))
        if gather_over is not None:
            low = gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=gather_over
            )
        lows = iter(low.split([len(a) for a, _ in present], dim=-1))
        return self.arrange(
            low, [None if pair is None else F.linear(next(lows), pair[1]) for pair in pairs]
        )

    def arrange(self, like: Tensor, parts: Sequence[Tensor | None]) -> Tensor:
        """Combine the updates [n, size] of the layer's Hugging Face weights into the column order
        of the layer's output (interleaved by query group for qkv), and scale them.

        A weight whose part is None gets zeros, with the dtype, device and n of `like`.
        """
        full = [
            like.new_zeros(*like.shape[:-1], size) if part is None else part
            for part, size in zip(parts, self.sizes, strict=True)
        ]
        if self.split in ("qkv", "gated_qkv"):
            grouped = [part.unflatten(-1, (self.num_groups, -1)) for part in full]
            if self.split == "gated_qkv":
                size, last = grouped[1].shape[-1], grouped[0].dim() - 1
                grouped[0] = gates_last(grouped[0], size, last)
            return torch.cat(grouped, dim=-1).flatten(-2) * self.scale
        return (torch.cat(full, dim=-1) if len(full) > 1 else full[0]) * self.scale

    @torch.no_grad()
    def matrix(self) -> Tensor:
        """Return `scale B A` of all weights of the layer, f32[out, in]. Merging adds it to the
        layer's weight."""
        inputs = next(a.shape[1] for a, _ in filter(None, self.pairs()))
        device = next(self.parameters()).device
        parts: list[Tensor] = [
            torch.zeros(size, inputs, device=device) if pair is None
            else (pair[1].float() @ pair[0].float()) * self.scale
            for pair, size in zip(self.pairs(), self.sizes, strict=True)
        ]  # fmt: skip
        return join(parts, self.split, self.num_groups)


def _of(matrix: str, part: LowRank, shared: LowRank | None) -> Tensor:
    own = getattr(part, matrix)
    return own if own is not None else getattr(shared, matrix)


class _Adapted:
    lora: Update

    def _forward_impl(
        self: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute Megatron's product and add the update, unless updates are turned off. The layer
        communicates the result afterwards."""
        product = super()._forward_impl(input, weight, *args, **kwargs)  # pyright: ignore
        if not self.lora.switch.is_on:
            return product
        return product + self.lora(input, self.tp_group if kwargs["sequence_parallel"] else None)


class AdaptedColumnLinear(_Adapted, ColumnParallelLinear):
    """A linear layer whose weight is split by rows over ranks, with an update."""


class AdaptedRowLinear(_Adapted, RowParallelLinear):
    """A linear layer whose weight is split by columns over ranks, with an update."""


class AdaptedReplicatedLinear(ReplicatedLinear):
    """A linear layer whose whole weight every rank holds, with an update."""

    lora: Update

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        product, _ = super().forward(x)
        return (product + self.lora(x) if self.lora.switch.is_on else product), None


ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumnLinear,
    RowParallelLinear: AdaptedRowLinear,
    ReplicatedLinear: AdaptedReplicatedLinear,
}
PLAIN = {of_adapter: plain for plain, of_adapter in ADAPTED.items()}


def add_expert_updates(
    product: Tensor, rows: Tensor, ends: Tensor, linears: Sequence[Any]
) -> Tensor:
    """Return `product` [m, out] of one linear layer of each expert, with the experts' updates
    added. If updates are turned off, `product` is returned unchanged.

    `rows` [m, in] are the inputs, sorted by expert; `ends` i32[E] are the indices after each
    expert's last row. `linears` are the layers of the E experts. The updates are computed as
    grouped matrix products too.
    """
    updates: list[Update] = [linear.lora for linear in linears]
    first = updates[0]
    if not first.switch.is_on:
        return product
    pairs = [update.pairs() for update in updates]
    parts: list[Tensor | None] = []
    for number in range(len(first.sizes)):
        out: Tensor | None = None
        if pairs[0][number] is not None:
            out = rows
            for place, matrix in enumerate("AB"):
                of_experts = [one[number][place] for one in pairs]  # pyright: ignore
                if first.is_shared(number, matrix):
                    out = F.linear(out, of_experts[0])
                else:
                    out = grouped_linear(out, ends, of_experts)
        parts.append(out)
    return product + first.arrange(product, parts)


def join_updates(experts: GroupedExperts) -> None:
    """Lay the experts' update matrices end to end in memory, as `GroupedExperts.join_storages` does
    with the experts' weights."""
    for linears in experts._linears:
        for name, part in linears[0].lora.named_children():
            for matrix in (name for name, one in part.named_parameters() if one is not None):
                join_parameters([getattr(getattr(linear.lora, name), matrix) for linear in linears])
