"""Says which matrices an adapter of a model has, and how large they are, without building the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mrl.config.adapter import Adapter, lora_name
from parallel.expected_tensors import rule_shapes
from parallel.hf_config import HfModel
from parallel.lora.rules import adapted, is_shared


def adapter_shapes(model: HfModel, adapter: Adapter) -> dict[str, tuple[int, int]]:
    """Return PEFT's name and the shape of every A [rank, inputs] and B [outputs, rank] of the whole
    model."""
    return {name: shape for name, _, shape in _matrices(model, adapter)}


def names_in_files(model: HfModel, adapter: Adapter) -> dict[str, list[str]]:
    """Return the names that every matrix of `adapter_shapes` has in a file: what experts share is there
    once for each of them."""
    found: dict[str, list[str]] = {}
    for name, in_file, _ in _matrices(model, adapter):
        found.setdefault(name, []).append(in_file)
    return found


def _matrices(model: HfModel, adapter: Adapter) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield the name of a matrix, that of its copy of one expert, and its shape."""
    matrices: tuple[Literal["A", "B"], ...] = ("A", "B")
    for rule, hf, place, shape in rule_shapes(model):
        if hf not in adapted(rule, adapter):
            continue
        outputs, inputs = shape
        sizes = {"A": (adapter.rank, inputs), "B": (outputs, adapter.rank)}
        for matrix in matrices:
            shared = is_shared(rule, adapter, matrix)
            name = hf.replace(".{expert}", "") if shared else hf
            in_file = lora_name(hf.format(**place), matrix)
            yield lora_name(name.format(**place), matrix), in_file, sizes[matrix]
