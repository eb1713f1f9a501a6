"""Count the parameters of a LoRA adapter in each layer. The trainer's rules for adapter matrices
determine which matrices exist."""

from __future__ import annotations

import dataclasses

from mrl.config.adapter import Adapter
from mrl.errors import InputError
from mrl.planner.parts import Part, Sharing
from mrl.planner.shape import AdaptedLayer, AdapterShape, ModelShape, read_shape
from parallel.architectures.base import Rule
from parallel.expected_tensors import rule_shapes
from parallel.hf_config import HfModel
from parallel.lora.rules import SHARED, adapted, adapter_pair


def adapted_shape(model: HfModel, adapter: Adapter | None) -> ModelShape:
    """Return the shape of a model as it is trained, with its adapter if there is one.

    Raises InputError for a model that `read_shape` refuses, or an adapter that `count_adapter` refuses.
    """
    shape = read_shape(model.config, model.architecture)
    if adapter is None:
        return shape
    return dataclasses.replace(shape, adapter=count_adapter(model, adapter))


def count_adapter(model: HfModel, adapter: Adapter) -> AdapterShape:
    """Return the sizes of an adapter's matrices. Only the model's config.json is needed.

    Modules whose sizes `parallel.expected_tensors` does not know are left out; only architectures
    that are defined outside mrl have such modules. Raises InputError if no layer of the model has
    any of the modules that the adapter targets.
    """
    layers = [_Layer() for _ in range(model.sizes.num_layers)]
    topk = model.architecture.transformer_config(model.config).get("moe_router_topk", 0)
    num_tensors = 0
    for rule, hf, place, shape in rule_shapes(model):
        if place["expert"] or hf not in adapted(rule, adapter):
            continue
        outputs, inputs = shape
        for own, size in zip(adapter_pair(rule, hf, adapter), (inputs, outputs), strict=True):
            is_per_expert = "{expert}" in own.megatron
            count = model.sizes.num_experts if is_per_expert else 1
            passes = topk if is_per_expert or f".{SHARED}." in own.megatron else 1
            numel = adapter.rank * size
            part = Part("adapter", _sharing(own), ((count, numel),), passes * numel)
            layers[place["layer"]].add(part, own, (adapter.rank, outputs), passes)
            num_tensors += count
    if not num_tensors:
        names = ", ".join(adapter.target_modules)
        raise InputError(f"lora.targets: no layer of this model has {names}; name others")
    return AdapterShape(adapter, tuple(layer.counted() for layer in layers), num_tensors)


def _sharing(rule: Rule) -> Sharing:
    if "{expert}" in rule.megatron:
        return "expert_whole" if rule.split == "none" else "expert"
    return "whole" if rule.split == "none" else "tensor"


class _Layer:
    """Collects the adapter matrices of one layer."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.gathered = self.kept = 0
        self.outputs: dict[str, int] = {}

    def add(self, part: Part, rule: Rule, sizes: tuple[int, int], passes: int) -> None:
        """Add the matrix A or B of an adapted module.

        `part` has the matrix's size and sharding, and `rule` its names. `sizes` is (the adapter's
        rank, number of outputs of the module). `passes` is the number of times that each token is
        multiplied by the matrix: top-k for matrices of experts, otherwise 1.
        """
        self.parts.append(part)
        if rule.megatron.endswith(".A"):
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
