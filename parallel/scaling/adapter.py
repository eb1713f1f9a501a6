"""Counts a LoRA adapter by layer, from the rules by which the trainer makes its parameters.

r rank, K experts per token.
"""

from __future__ import annotations

import dataclasses
import re

from mrl.config.adapter import PEFT_PREFIX, Adapter
from mrl.errors import InputError
from parallel.architectures.base import Rule
from parallel.expected_tensors import Shape, rule_shapes
from parallel.hf_config import HfModel
from parallel.lora.rules import SHARED, adapter_rules
from parallel.scaling.shape import AdaptedLayer, AdapterShape, ModelShape, Part, Sharing, read_shape

MATRIX = re.compile(r"\.lora_([AB])\.weight$")


def adapted_shape(model: HfModel, adapter: Adapter | None) -> ModelShape:
    """Return the shape of a model as it is trained: with its adapter, where it has one.

    Raises InputError as `read_shape` and `count_adapter` do.
    """
    shape = read_shape(model.config, model.architecture)
    return with_adapter(shape, model, adapter)


def with_adapter(shape: ModelShape, model: HfModel, adapter: Adapter | None) -> ModelShape:
    """Add the adapter, where there is one, to the shape of the model."""
    if adapter is None:
        return shape
    return dataclasses.replace(shape, adapter=count_adapter(model, adapter))


def count_adapter(model: HfModel, adapter: Adapter) -> AdapterShape:
    """Count the parameters of an adapter. Nothing of the model but its config.json is read.

    Modules of an outside architecture whose sizes `parallel.expected_tensors` does not know are left
    out. Raises InputError where no layer has one of the modules.
    """
    layers = [_Layer() for _ in range(model.sizes.num_layers)]
    weights = _adapted_weights(model)
    topk = model.architecture.transformer_config(model.config).get("moe_router_topk", 0)
    num_tensors = 0
    for rule in adapter_rules(model.architecture.rules(model.config), adapter):
        (name,) = rule.hf
        matrix, hf = _base_of(name)
        if hf not in weights:
            continue  # the table has rows that not every model of the architecture has
        (outputs, inputs), numbers = weights[hf]
        numel = adapter.rank * (inputs if matrix == "A" else outputs)
        is_own = "{expert}" in rule.megatron
        count = model.sizes.num_experts if is_own else 1
        passes = topk if is_own or f".{SHARED}." in rule.megatron else 1
        part = Part("adapter", _sharing(rule), ((count, numel),), passes * numel)
        for number in numbers:
            num_tensors += count
            layers[number].add(part, rule, matrix, (adapter.rank, outputs), passes)
    if not num_tensors:
        names = ", ".join(adapter.target_modules)
        raise InputError(f"lora.targets: no layer of this model has {names}; name others")
    return AdapterShape(adapter, tuple(layer.counted() for layer in layers), num_tensors)


def _adapted_weights(model: HfModel) -> dict[str, tuple[Shape, list[int]]]:
    """Return [outputs, inputs] and the layers of the model's matrices, by their Hugging Face names
    without the numbers of expert and layer."""
    found: dict[str, tuple[Shape, list[int]]] = {}
    for _, hf, place, shape in rule_shapes(model):
        if place["expert"] == 0 and len(shape) == 2:
            _, numbers = found.setdefault(hf.replace(".{expert}", ""), (shape, []))
            numbers.append(place["layer"])
    return found


def _base_of(name: str) -> tuple[str, str]:
    """Return `A` or `B`, and the weight that a matrix of PEFT's `name` updates."""
    matrix = MATRIX.search(name)
    assert matrix is not None, f"{name} is no name of PEFT's"
    hf = MATRIX.sub(".weight", name.removeprefix(PEFT_PREFIX)).replace(".{expert}", "")
    return matrix[1], hf


def _sharing(rule: Rule) -> Sharing:
    if "{expert}" in rule.megatron:
        return "expert_whole" if rule.split == "none" else "expert"
    return "whole" if rule.split == "none" else "tensor"


class _Layer:
    """Collects what an adapter has in one layer."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.gathered = self.kept = 0
        self.outputs: dict[str, int] = {}

    def add(self, part: Part, rule: Rule, matrix: str, sizes: tuple[int, int], passes: int) -> None:
        """Enter a matrix. `sizes`: (rank, outputs) of the update. `passes`: times that a token goes
        through it."""
        self.parts.append(part)
        if matrix == "A":
            return
        rank, outputs = sizes
        if part.sharing == "tensor":
            self.gathered += rank
        else:
            self.kept += passes * rank
        linear = rule.megatron.partition(".lora.")[0]
        self.outputs[linear] = self.outputs.get(linear, 0) + passes * outputs

    def counted(self) -> AdaptedLayer:
        outputs = max(self.outputs.values(), default=0)
        return AdaptedLayer(tuple(self.parts), self.gathered, self.kept, outputs)
