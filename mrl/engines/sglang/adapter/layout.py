"""The memory layout of an adapter's matrices, as SGLang reads them.

PEFT has one 2-D tensor for every matrix, and the name of an expert's matrix contains the index of
the expert. SGLang usually takes the same tensors. The exception is the stacked form, for experts
that share their outer matrices (srt/lora/mem_pool.py, `experts_shared_outer_loras`). The outer
matrices have a dimension H: A of the gate and up projections, and B of the down projection. The
stacked form has one 3-D tensor for all experts of a layer, under a name without an index: [1, r, H]
or [1, H, r] for shared matrices, and [E, I, r] or [E, r, I] for matrices of each expert. An engine
takes all of its adapters in the same form. If that form is not the stacked one, a shared matrix has
one name for each expert, and all of these names refer to the same memory.

Dimensions: r rank of the adapter, E experts of a layer, H hidden size, I intermediate size of experts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from mrl.config.adapter import Adapter
from mrl.engines.sglang.adapter.limits import SGLANG_NAMES
from mrl.engines.sglang.manifest import Shapes
from mrl.engines.sglang.weights.tensor import place_of
from mrl.system.shared_memory import SharedBuffer

NUMBER = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class AdapterMemory:
    """The matrices of one version of an adapter, in shared memory that an engine maps."""

    buffer: SharedBuffer
    places: list[SimpleNamespace]
    """SGLang's descriptions of the tensors in the buffer: name, shape, dtype and range of bytes."""
    views: dict[str, Tensor]
    """The 2-D tensors by PEFT's names, as views of the buffer."""
    num_bytes: int


class AdapterLayout:
    """The place of each matrix of an adapter in the memory that SGLang reads."""

    def __init__(self, shapes: Shapes, adapter: Adapter, *, stacks: bool | None = None) -> None:
        """`shapes` has the shapes of all matrices by PEFT's names, including matrices that stay 0.
        `stacks`: whether the engine takes the stacked form; by default, it does if the adapter's
        experts share their outer matrices. Raises ValueError for `stacks=True` if every expert has
        matrices of its own."""
        is_shared = adapter.experts == "shared_outer"
        self._stacks = is_shared if stacks is None else stacks
        if self._stacks and adapter.experts == "per_expert":
            raise ValueError("AdapterLayout: got stacks=True for per_expert, expected shared_outer")
        self._shapes = dict(shapes)
        self._numbers = _expert_numbers(shapes)
        self._tensors: dict[str, tuple[int, ...]] = {}
        """The shapes of SGLang's tensors, by name. A tensor that has one name for each expert is listed
        under the first name."""
        for name, shape in shapes.items():
            wire, number = self._place_of(name)
            if number is None:
                self._tensors[wire] = shape
            else:
                num_held = max(number + 1, self._tensors.get(wire, (0,))[0])
                self._tensors[wire] = (num_held, *shape)
        self._same = {names[0]: names for names in map(self.sent_names, shapes)}
        """All names of each tensor, by its first name. A stacked tensor has only one name, and may
        be missing here."""

    def sent_names(self, name: str) -> list[str]:
        """Return the engine's names of the matrix that PEFT calls `name`, with SGLang's module names. A
        matrix that experts share has one name for each expert, unless the engine takes the stacked
        form."""
        module = name.split(".")[-3]
        wire = name.replace(f".{module}.lora_", f".{SGLANG_NAMES.get(module, module)}.lora_")
        if self._stacks or ".experts." not in wire or NUMBER.search(wire):
            return [wire]
        layer, _, rest = wire.partition(".experts.")
        return [f"{layer}.experts.{number}.{rest}" for number in self._numbers[layer]]

    def _place_of(self, name: str) -> tuple[str, int | None]:
        """Find the SGLang tensor that contains the matrix that PEFT calls `name`.

        Return the tensor's name (the first one if it has one name for each expert), and the index of
        the matrix in the tensor. The index is None if the tensor is not stacked.
        """
        wire = self.sent_names(name)[0]
        if not self._stacks or ".experts." not in wire:
            return wire, None
        found = NUMBER.search(wire)
        return NUMBER.sub(".experts.", wire), int(found[1]) if found else 0

    def allocate(self, dtype: torch.dtype) -> AdapterMemory:
        """Return new memory for one version, filled with zeros.

        SGLang keeps some matrices where they are, without a copy, so the memory must not be reused.
        """
        size, starts = dtype.itemsize, {}
        start = 0
        for wire, shape in self._tensors.items():
            starts[wire] = start
            start += math.prod(shape) * size
        places = [
            place_of(wire, shape, dtype, starts[first])
            for first, shape in self._tensors.items()
            for wire in self._same.get(first, [first])
        ]
        buffer = SharedBuffer(start)
        views = {}
        for name, shape in self._shapes.items():
            wire, number = self._place_of(name)
            num_bytes = math.prod(shape) * size
            first = starts[wire] + (number or 0) * num_bytes
            views[name] = buffer.tensor[first : first + num_bytes].view(dtype).view(shape)
        return AdapterMemory(buffer, places, views, start)


def _expert_numbers(shapes: Shapes) -> dict[str, list[int]]:
    """Return the sorted expert indices of each layer, keyed by the part of the tensor names before
    `.experts.`."""
    found: dict[str, set[int]] = {}
    for name in shapes:
        if number := NUMBER.search(name):
            found.setdefault(name[: number.start()], set()).add(int(number[1]))
    return {layer: sorted(numbers) for layer, numbers in found.items()}
