"""The parameters of a model by kind, and how each kind is shared by ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sharing = Literal["whole", "tensor", "expert", "expert_whole"]
"""How a parameter is sharded over the ranks of a pipeline stage:

- `whole`: every rank holds all of it.
- `tensor`: it is split over the tensor-parallel ranks.
- `expert`: it is split over the expert-parallel and the expert-tensor-parallel ranks.
- `expert_whole`: it is split over the expert-parallel ranks only, each of which holds whole matrices.
"""


Tensors = tuple[tuple[int, int], ...]
"""Pairs of (number of tensors, number of elements of each)."""


@dataclass(frozen=True)
class Part:
    """The parameters of one kind in one layer, in the embedding or in the output layer."""

    name: str
    """The kind of the parameters: `embedding`, `output`, `attention`, `indexer`, `router`, `experts`,
    `shared`, `dense`, `norms`, or `adapter`."""
    sharing: Sharing
    tensors: Tensors
    """Number and sizes of Megatron's parameters before any sharding (see `Tensors`)."""
    num_active: int
    """Number of elements that are used for one token."""
    is_muons: bool = False
    """Whether they are weight matrices that Muon would update, as `matrices_of` of
    `parallel.optimizer.muon_setup` finds them."""
    is_frozen: bool = False
    """Whether they are never trained, with or without an adapter."""

    @property
    def num(self) -> int:
        """Number of elements before any sharding."""
        return sum(count * numel for count, numel in self.tensors)


def all_active(name: str, sharing: Sharing, *numels: int, is_muons: bool = False) -> Part:
    """Return a part with one tensor for each size in `numels`. Every token uses all elements."""
    return Part(name, sharing, tuple((1, numel) for numel in numels), sum(numels), is_muons)
