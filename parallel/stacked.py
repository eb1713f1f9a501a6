"""Tensors of a checkpoint that hold the weights of all experts of a layer (`Architecture.stacked`).

mrl names the weights of each expert apart, because a rank has some experts only. Here such tensors are
taken apart as they are read, and put together as they are written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.architectures.base import Stacked
from parallel.hf_config import HfModel


@dataclass(frozen=True)
class Slice:
    """One expert's weight or bias in a stacked tensor (see `Stacked`)."""

    stored: str
    """The name of the tensor in the checkpoint."""
    expert: int
    part: int
    num_parts: int

    def shape(self, stored: Collection[int]) -> tuple[int, ...]:
        """Return the shape of the weight, given the shape of the stacked tensor."""
        *inner, last = tuple(stored)[1:]
        return (last // self.num_parts, *inner)

    def take(self, rows: Any) -> Tensor:
        """Read the weight [out, in] or bias [out]. `rows` is safetensors' slice of the tensor."""
        whole = rows[self.expert : self.expert + 1][0]
        return whole[..., self.part :: self.num_parts].movedim(-1, 0).contiguous()


def slices_of(model: HfModel, stored: Collection[str]) -> dict[str, Slice]:
    """Return the weights that stacked tensors among the names `stored` hold, by their own names."""
    found = {}
    for stacked, layer in _of_layers(model):
        name = stacked.name.format(layer=layer)
        for part, own in enumerate(stacked.parts if name in stored else ()):
            for expert in range(model.sizes.num_experts):
                piece = Slice(name, expert, part, len(stacked.parts))
                found[own.format(layer=layer, expert=expert)] = piece
    return found


def stored_names(model: HfModel, missing: Collection[str]) -> list[str]:
    """Return the names of tensors that a checkpoint lacks, as its files would name them: a stacked
    tensor stands for its weights if all of them are missing."""
    stored = {}
    for stacked, layer in _of_layers(model):
        experts = range(model.sizes.num_experts)
        own = [part.format(layer=layer, expert=e) for part in stacked.parts for e in experts]
        if set(own).issubset(missing):
            stored |= dict.fromkeys(own, stacked.name.format(layer=layer))
    return list(dict.fromkeys(stored.get(name, name) for name in missing))


def stored_tensors(
    tensors: Iterable[tuple[str, Tensor]], model: HfModel
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as the checkpoint has them: the weights of experts that it stacks are put
    together, and all others are yielded as they are.

    A stacked tensor is yielded when its last weight came. Raises ValueError if some of its weights do
    not come.
    """
    pieces = {
        own.format(layer=layer, expert=expert): (stacked.name.format(layer=layer), expert, part)
        for stacked, layer in _of_layers(model)
        for part, own in enumerate(stacked.parts)
        for expert in range(model.sizes.num_experts)
    }
    num_parts = {s.name.format(layer=n): len(s.parts) for s, n in _of_layers(model)}
    waiting: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, tensor in tensors:
        if name not in pieces:
            yield name, tensor
            continue
        stored, expert, part = pieces[name]
        found = waiting.setdefault(stored, {})
        found[expert, part] = tensor.clone()  # the caller may overwrite it
        if len(found) == model.sizes.num_experts * num_parts[stored]:
            yield stored, _stack(waiting.pop(stored), num_parts[stored])
    if waiting:
        stored, found = next(iter(waiting.items()))
        raise ValueError(f"{stored}: got {len(found)} weights of its experts, expected all of them")


def _stack(found: dict[tuple[int, int], Tensor], num_parts: int) -> Tensor:
    """Put weights [out, in] or biases [out] by (expert, part) together to [E, in, K out] or [E, K
    out]."""
    rows = [
        torch.stack([found[expert, part] for part in range(num_parts)], dim=1).flatten(0, 1)
        for expert in range(len(found) // num_parts)
    ]
    return torch.stack([row.movedim(0, -1) for row in rows])


def _of_layers(model: HfModel) -> Iterator[tuple[Stacked, int]]:
    for stacked in model.architecture.stacked:
        for number in model.moe_layer_numbers:
            yield stacked, number - 1
