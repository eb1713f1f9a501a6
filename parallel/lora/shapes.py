"""Says which matrices an adapter of a model has, and how large they are, without building the model."""

from __future__ import annotations

from typing import Literal

from mrl.lora import Adapter, lora_name
from parallel.expected_tensors import rule_shapes
from parallel.hf_config import HfModel
from parallel.lora.rules import adapted, is_shared


def adapter_shapes(model: HfModel, adapter: Adapter) -> dict[str, tuple[int, int]]:
    """Return PEFT's name and the shape of every A [rank, inputs] and B [outputs, rank] of the whole
    model."""
    found: dict[str, tuple[int, int]] = {}
    matrices: tuple[Literal["A", "B"], ...] = ("A", "B")
    for rule, hf, place, shape in rule_shapes(model):
        if hf not in adapted(rule, adapter):
            continue
        outputs, inputs = shape
        sizes = {"A": (adapter.rank, inputs), "B": (outputs, adapter.rank)}
        for matrix in matrices:
            shared = is_shared(rule, adapter, matrix)
            name = hf.replace(".{expert}", "") if shared else hf
            found[lora_name(name.format(**place), matrix)] = sizes[matrix]
    return found
