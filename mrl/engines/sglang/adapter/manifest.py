"""The matrices of an adapter by PEFT's names, derived from the checkpoint of its base model.

Dimensions: r rank of the adapter, E experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mrl.config.adapter import Adapter, AdapterLimits, lora_name
from mrl.engines.sglang.adapter.limits import SGLANG_NAMES, refuse_modules
from mrl.engines.sglang.manifest import Arrivals, Shapes
from mrl.errors import InputError

EXPERT = re.compile(r"\.experts\.\d+\.")
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Groups of modules that SGLang fuses. It accepts adapters for all modules of a group or for none."""


class AdapterManifest(Arrivals):
    """The names and shapes of an adapter's matrices, and a record of the matrices that have arrived."""

    def __init__(self, checkpoint: Shapes, adapter: Adapter) -> None:
        """`checkpoint` has the shapes of the base model's weights by Hugging Face's names.

        Raises InputError for an adapted module that the checkpoint does not have, or for which SGLang
        serves no adapter.
        """
        refuse_modules(adapter, {name.split(".")[-2] for name in checkpoint})
        shapes = dict(_matrices(checkpoint, adapter, adapter.modules, adapter.expert_modules))
        adapted = {name.split(".")[-3] for name in shapes}
        for name in adapter.target_modules:
            if name not in adapted:
                raise InputError(
                    f"lora.rollout=adapter: the checkpoint has no {name!r} that could be adapted; "
                    "correct lora.targets and lora.experts"
                )
        modules, expert_modules = _with_fused(adapter.modules), _with_fused(adapter.expert_modules)
        whole = dict(_matrices(checkpoint, adapter, modules, expert_modules))
        super().__init__(shapes, of="adapter")
        self.adapter = adapter
        self.zeros = {name: shape for name, shape in whole.items() if name not in shapes}
        """The shapes of additional matrices that SGLang requires, by name. They are sent as zeros."""


def sglang_modules(adapter: Adapter | AdapterLimits) -> list[str]:
    """Return SGLang's names of the adapted modules."""
    return [SGLANG_NAMES.get(name, name) for name in adapter.target_modules]


def _with_fused(modules: Sequence[str]) -> list[str]:
    """Return these modules, and the modules that SGLang fuses with them."""
    fused = [name for group in TOGETHER if set(group) & set(modules) for name in group]
    return list(dict.fromkeys([*modules, *fused]))


def _matrices(
    checkpoint: Shapes, adapter: Adapter, modules: Sequence[str], expert_modules: Sequence[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of A [r, inputs] and B [outputs, r] of every adapted module. A matrix
    that experts share is yielded once for each expert."""
    for name, shape in checkpoint.items():
        if len(shape) != 2 or not name.endswith(".weight"):
            continue
        module, is_expert = name.split(".")[-2], EXPERT.search(name) is not None
        if module not in (expert_modules if is_expert else modules):
            continue
        shared = ""
        if is_expert and adapter.experts == "shared_outer":
            shared = "B" if SGLANG_NAMES.get(module, module) == "down_proj" else "A"
        of_all = EXPERT.sub(".experts.", name)
        yield lora_name(of_all if shared == "A" else name, "A"), (adapter.rank, shape[1])
        yield lora_name(of_all if shared == "B" else name, "B"), (shape[0], adapter.rank)
