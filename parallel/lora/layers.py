"""These linear layers of Megatron have low-rank updates: W x + scale B (A x), W frozen.

The update enters where the layer multiplies and before it communicates. Of a layer whose rows are cut,
A multiplies this rank's tokens and the few numbers of A x are gathered with them. Of one whose columns
are cut, each rank adds its part before the sum over the ranks that the layer does anyway.

r rank, n tokens of a product, in and out sizes of this rank's part of the layer.
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
from parallel.shards import join


class Switch:
    """A switch turns all updates of a model off and on: off, it is the base."""

    is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class LowRank(torch.nn.Module):
    """A [r, in] and B [out, r] of one Hugging Face weight; the one that experts share is not here."""

    A: torch.nn.Parameter | None
    B: torch.nn.Parameter | None


Pair = tuple[Tensor, Tensor]
"""A and B."""


class Update(torch.nn.Module):
    """The update of a linear layer, which Megatron may have joined of several Hugging Face weights."""

    split: Split

    def __init__(
        self, split: Split, sizes: Sequence[int], num_groups: int, scale: float, switch: Switch
    ) -> None:
        """`sizes`: rows of each of its Hugging Face weights here. `num_groups`: query groups here."""
        super().__init__()
        self.split, self.sizes, self.num_groups = split, list(sizes), num_groups
        self.scale, self.switch = scale, switch
        self._parts: list[LowRank | None] = [None] * len(self.sizes)
        self._shared: list[tuple[LowRank | None]] = [(None,)] * len(self.sizes)

    def add(self, number: int, name: str, part: LowRank, shared: LowRank | None) -> None:
        """Enter the matrices of weight `number`. `shared` is held by the MoE layer."""
        self.add_module(name, part)
        self._parts[number] = part
        self._shared[number] = (shared,)  # in a tuple: it is no child of this module

    def pairs(self) -> list[Pair | None]:
        """Return A and B of each weight; None for one without an update."""
        return [
            None if part is None else (_of("A", part, shared), _of("B", part, shared))
            for part, (shared,) in zip(self._parts, self._shared, strict=True)
        ]

    def is_shared(self, number: int, matrix: str) -> bool:
        """Whether weight `number` takes this matrix from what the experts share."""
        part = self._parts[number]
        return part is not None and getattr(part, matrix) is None

    def forward(self, x: Tensor, gather_over: Any = None) -> Tensor:
        """Compute the update [n, out] of x [n, in]. `gather_over`: the group whose ranks have the other
        tokens, where the layer gathers them."""
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
        """Lay the products [n, size] of the weights out as the layer's own product, and scale them."""
        full = [
            like.new_zeros(*like.shape[:-1], size) if part is None else part
            for part, size in zip(parts, self.sizes, strict=True)
        ]
        if self.split == "qkv":
            grouped = [part.unflatten(-1, (self.num_groups, -1)) for part in full]
            return torch.cat(grouped, dim=-1).flatten(-2) * self.scale
        return (torch.cat(full, dim=-1) if len(full) > 1 else full[0]) * self.scale

    @torch.no_grad()
    def matrix(self) -> Tensor:
        """Return scale B A of the whole layer, f32[out, in]: what merging adds to its weight."""
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
        """Megatron's product, and the update in it; what the layer communicates comes after this."""
        product = super()._forward_impl(input, weight, *args, **kwargs)  # pyright: ignore
        if not self.lora.switch.is_on:
            return product
        return product + self.lora(input, self.tp_group if kwargs["sequence_parallel"] else None)


class AdaptedColumnLinear(_Adapted, ColumnParallelLinear):
    """A linear layer whose rows are cut, with an update."""


class AdaptedRowLinear(_Adapted, RowParallelLinear):
    """A linear layer whose columns are cut, with an update."""


class AdaptedReplicatedLinear(ReplicatedLinear):
    """A linear layer that is whole on every rank, with an update."""

    lora: Update

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        product, _ = super().forward(x)
        return (product + self.lora(x) if self.lora.switch.is_on else product), None


class AdaptedExperts(GroupedExperts):
    """These grouped experts have updates, each of which is a grouped product too."""

    def _product(self, rows: Tensor, ends: Tensor, linears: list[Any]) -> Tensor:
        product = super()._product(rows, ends, linears)
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

    def join_updates(self) -> None:
        """Lay the matrices of the experts end to end, as `join_storages` does with their weights."""
        for linears in self._linears:
            for name, part in linears[0].lora.named_children():
                for matrix in (name for name, one in part.named_parameters() if one is not None):
                    join_parameters(
                        [getattr(getattr(linear.lora, name), matrix) for linear in linears]
                    )


ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumnLinear,
    RowParallelLinear: AdaptedRowLinear,
    ReplicatedLinear: AdaptedReplicatedLinear,
    GroupedExperts: AdaptedExperts,
}
PLAIN = {of_adapter: plain for plain, of_adapter in ADAPTED.items()}
