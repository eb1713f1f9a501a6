"""An adapter's matrices in one piece of memory, in the form in which SGLang takes them.

PEFT has a 2-D tensor for every matrix. SGLang takes the same ones, but for experts that share their
outer matrices (srt/lora/mem_pool.py, `experts_shared_outer_loras`): there a layer has one 3-D tensor
for all experts, [1, r, H] or [1, H, r] of what they share and [E, I, r] or [E, r, I] of what is each
one's own, under a name without the number of an expert.

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

    def __init__(self, shapes: Shapes, adapter: Adapter) -> None:
        """`shapes` of all matrices by PEFT's names, with those that stay 0."""
        self._shapes = dict(shapes)
        self._is_shared = adapter.experts == "shared_outer"
        self._tensors: dict[str, tuple[int, ...]] = {}
        """The shapes of what SGLang is sent, by its names."""
        for name, shape in shapes.items():
            wire, number = self._home(name)
            if number is None:
                self._tensors[wire] = shape
            else:
                num_held = max(number + 1, self._tensors.get(wire, (0,))[0])
                self._tensors[wire] = (num_held, *shape)

    def sent_name(self, name: str) -> str:
        """Return the name under which the engine says what it holds of PEFT's `name`: with the number
        of an expert, and by SGLang's names of modules."""
        module = name.split(".")[-3]
        return name.replace(f".{module}.lora_", f".{SGLANG_NAMES.get(module, module)}.lora_")

    def _home(self, name: str) -> tuple[str, int | None]:
        """Return SGLang's name of the tensor that holds PEFT's `name`, and where in it."""
        wire = self.sent_name(name)
        if not self._is_shared or ".experts." not in wire:
            return wire, None
        found = NUMBER.search(wire)
        return NUMBER.sub(".experts.", wire), int(found[1]) if found else 0

    def lay_out(self, dtype: torch.dtype) -> LaidOut:
        """Return new memory full of zeros.

        New for each version: SGLang keeps what it needs no copy of where it lies, and would see what
        is written there later.
        """
        size, places, starts = dtype.itemsize, [], {}
        start = 0
        for wire, shape in self._tensors.items():
            num_bytes = math.prod(shape) * size
            places.append(
                SimpleNamespace(
                    name=wire,
                    shape=torch.Size(shape),
                    dtype=dtype,
                    start_idx=start,
                    end_idx=start + num_bytes,
                    numel=num_bytes,
                )
            )
            starts[wire] = start
            start += num_bytes
        memory = SharedBuffer(start)
        views = {}
        for name, shape in self._shapes.items():
            wire, number = self._home(name)
            num_bytes = math.prod(shape) * size
            first = starts[wire] + (number or 0) * num_bytes
            views[name] = memory.tensor[first : first + num_bytes].view(dtype).view(shape)
        return LaidOut(memory, places, views, start)
