"""An adapter's matrices in one piece of memory, in the form in which SGLang takes them.

PEFT has a 2-D tensor for every matrix. SGLang takes the same ones, but for experts that share their
outer matrices (srt/lora/mem_pool.py, `experts_shared_outer_loras`): there a layer has one 3-D tensor
for all experts, [1, r, H] or [1, H, r] of what they share and [E, I, r] or [E, r, I] of what is each
one's own, under a name without the number of an expert. An engine takes either form for all of its
adapters. Where it takes the numbered one, what experts share has one name for each of them, and all of
these names stand for the same memory.

Dimensions: r rank of the adapter, E experts of a layer, H hidden size, I size of an expert's inside.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from mrl.config.adapter import Adapter
from mrl.rollout.sglang.adapter.limits import SGLANG_NAMES
from mrl.rollout.sglang.manifest import Shapes
from mrl.system.shared_memory import SharedBuffer

NUMBER = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class LaidOut:
    """Holds the matrices of one version of an adapter, in memory that an engine maps."""

    memory: SharedBuffer
    places: list[SimpleNamespace]
    """What SGLang is told of the tensors that lie there, as `weights.flatten_bucket` does."""
    views: dict[str, Tensor]
    """The 2-D tensors by PEFT's names: whoever writes into them writes into the memory."""
    num_bytes: int


class AdapterForm:
    """Knows where each matrix of an adapter lies in what SGLang is sent."""

    def __init__(self, shapes: Shapes, adapter: Adapter, *, stacks: bool | None = None) -> None:
        """`shapes` of all matrices by PEFT's names, with those that stay 0. `stacks`: the engine takes
        one tensor for all experts of a layer; by default where they share their outer matrices.

        Raises ValueError where experts that share nothing were to be stacked.
        """
        is_shared = adapter.experts == "shared_outer"
        self._stacks = is_shared if stacks is None else stacks
        if self._stacks and adapter.experts == "per_expert":
            raise ValueError("AdapterForm: got stacks=True for per_expert, expected shared_outer")
        self._shapes = dict(shapes)
        self._numbers = _expert_numbers(shapes)
        self._tensors: dict[str, tuple[int, ...]] = {}
        """The shapes of what SGLang is sent, by the first of the names."""
        for name, shape in shapes.items():
            wire, number = self._home(name)
            if number is None:
                self._tensors[wire] = shape
            else:
                num_held = max(number + 1, self._tensors.get(wire, (0,))[0])
                self._tensors[wire] = (num_held, *shape)
        self._same = {names[0]: names for names in map(self.sent_names, shapes)}
        """The names of each tensor; of a stacked one its own."""

    def sent_names(self, name: str) -> list[str]:
        """Return the names under which the engine says what it holds of PEFT's `name`: by SGLang's
        names of modules, and one for each expert where the engine does not know that they share it."""
        module = name.split(".")[-3]
        wire = name.replace(f".{module}.lora_", f".{SGLANG_NAMES.get(module, module)}.lora_")
        if self._stacks or ".experts." not in wire or NUMBER.search(wire):
            return [wire]
        layer, _, rest = wire.partition(".experts.")
        return [f"{layer}.experts.{number}.{rest}" for number in self._numbers[layer]]

    def _home(self, name: str) -> tuple[str, int | None]:
        """Return the (first) name of SGLang's tensor that holds PEFT's `name`, and where in it."""
        wire = self.sent_names(name)[0]
        if not self._stacks or ".experts." not in wire:
            return wire, None
        found = NUMBER.search(wire)
        return NUMBER.sub(".experts.", wire), int(found[1]) if found else 0

    def lay_out(self, dtype: torch.dtype) -> LaidOut:
        """Return new memory full of zeros.

        New for each version: SGLang keeps what it needs no copy of where it lies, and would see what
        is written there later.
        """
        size, starts = dtype.itemsize, {}
        start = 0
        for wire, shape in self._tensors.items():
            starts[wire] = start
            start += math.prod(shape) * size
        places = [
            SimpleNamespace(
                name=wire,
                shape=torch.Size(shape),
                dtype=dtype,
                start_idx=starts[first],
                end_idx=starts[first] + math.prod(shape) * size,
                numel=math.prod(shape) * size,
            )
            for first, shape in self._tensors.items()
            for wire in self._same.get(first, [first])
        ]
        memory = SharedBuffer(start)
        views = {}
        for name, shape in self._shapes.items():
            wire, number = self._home(name)
            num_bytes = math.prod(shape) * size
            first = starts[wire] + (number or 0) * num_bytes
            views[name] = memory.tensor[first : first + num_bytes].view(dtype).view(shape)
        return LaidOut(memory, places, views, start)


def _expert_numbers(shapes: Shapes) -> dict[str, list[int]]:
    """Return the numbers of a layer's experts, by what stands before `.experts.` in names."""
    found: dict[str, set[int]] = {}
    for name in shapes:
        if number := NUMBER.search(name):
            found.setdefault(name[: number.start()], set()).add(int(number[1]))
    return {layer: sorted(numbers) for layer, numbers in found.items()}
