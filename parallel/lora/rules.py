"""Derives the rules of an adapter's parameters from an architecture's table, and reads `lora.targets`.

Each adapted Hugging Face weight has an A and a B of its own, also where Megatron joins several of them
in one layer (query, key and value; gate and up). How they are cut over tensor-parallel ranks follows
from the rule of the layer: where its rows are cut, B is cut by rows and A is whole; where its columns
are cut, A is cut by columns and B is whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from mrl.config import LoraConfig
from mrl.config.adapter import Adapter, lora_name
from mrl.errors import InputError
from parallel.architectures.base import Rule, Split
from parallel.expected_tensors import Shape, rule_shapes
from parallel.hf_config import HfModel

LINEAR = re.compile(r"\.linear_\w+\.weight$")
"""Megatron's linear layers. Embeddings, norms, routers and the output layer have other names."""
SHARED = "shared_outer"
"""The module of an MoE layer that holds what its experts share."""
UNSUPPORTED = {
    "gate": "the router stays that of the base: SGLang cannot serve an adapter of it",
    "lm_head": "the output layer stays that of the base: it would have to be cut and served apart",
    "embed_tokens": "the embedding stays that of the base: it would have to be cut and served apart",
}


def module_name(hf_name: str) -> str:
    """Return the last name of the module that has a weight: `q_proj`."""
    return hf_name.removesuffix(".weight").rpartition(".")[2]


def is_adapter(name: str) -> bool:
    """Whether a Megatron parameter belongs to an adapter."""
    return ".lora." in name or f".{SHARED}." in name


def is_shared(rule: Rule, adapter: Adapter, matrix: Literal["A", "B"]) -> bool:
    """Tell whether the experts of a layer share this matrix of the linear layer of `rule`."""
    outer = "B" if rule.split == "columns" else "A"
    return "{expert}" in rule.megatron and adapter.experts == "shared_outer" and matrix == outer


def adapted(rule: Rule, adapter: Adapter) -> list[str]:
    """Return those of the rule's Hugging Face weights that the adapter updates."""
    if not LINEAR.search(rule.megatron):
        return []
    names = adapter.expert_modules if "{expert}" in rule.megatron else adapter.modules
    return [hf for hf in rule.hf if module_name(hf) in names]


def adapter_rules(rules: Iterable[Rule], adapter: Adapter) -> list[Rule]:
    """Return a rule for every A and B of an adapter of the model with `rules`."""
    found: dict[str, Rule] = {}
    for rule in rules:
        for hf in adapted(rule, adapter):
            for one in adapter_pair(rule, hf, adapter):
                found[one.megatron] = one
    return list(found.values())


def adapter_pair(rule: Rule, hf: str, adapter: Adapter) -> Iterator[Rule]:
    """Yield the rules of A and B of an adapted Hugging Face weight of `rule`."""
    splits: tuple[Split, Split] = ("none", "none" if rule.split == "none" else "rows")
    if rule.split == "columns":
        splits = ("columns", "none")
    matrices: tuple[Literal["A", "B"], ...] = ("A", "B")
    for matrix, split in zip(matrices, splits, strict=True):
        if is_shared(rule, adapter, matrix):
            layer = rule.megatron.partition(".experts.")[0]
            name = f"{layer}.{SHARED}.{module_name(hf)}.{matrix}"
            yield Rule(name, (lora_name(hf.replace(".{expert}", ""), matrix),), "none")
        else:
            layer = rule.megatron.removesuffix(".weight")
            yield Rule(f"{layer}.lora.{module_name(hf)}.{matrix}", (lora_name(hf, matrix),), split)


def read_adapter(config: LoraConfig, model: HfModel) -> Adapter:
    """Return the adapter that the recipe asks for, of the modules that the model has.

    Raises InputError for a module that the model does not have, or that cannot have an adapter.
    """
    attention: dict[str, None] = {}
    others: dict[str, None] = {}
    experts: dict[str, None] = {}
    # The table of an architecture has rules of layers that this model lacks (dense ones, latents).
    for rule, hf, _, _ in rule_shapes(model):
        if LINEAR.search(rule.megatron):
            kind = attention if ".self_attention." in rule.megatron else others
            kind = experts if "{expert}" in rule.megatron else kind
            kind[module_name(hf)] = None
    named = tuple(attention) if config.targets == "attention" else config.targets
    for name in named:
        if name not in {**attention, **others}:
            known = ", ".join({**attention, **others})
            why = f": {UNSUPPORTED[name]}" if name in UNSUPPORTED else ""
            if name in experts:
                why = ": it is a module of the experts, which lora.experts decides about"
            raise InputError(
                f"lora.targets: got {name!r}{why}; give `attention`, or some of {known}"
            )
    if not named and config.experts == "none":
        raise InputError("lora.targets is empty and lora.experts is none: nothing would be trained")
    if config.experts != "none" and not model.sizes.num_experts:
        raise InputError(
            f"lora.experts is {config.experts}, but the model has no experts; give none"
        )
    return Adapter(
        config.rank,
        config.alpha,
        tuple(dict.fromkeys(named)),
        config.experts,
        () if config.experts == "none" else tuple(experts),
    )


def check_rank(adapter: Adapter, model: HfModel, key: str = "lora.rank") -> None:
    """Raise InputError if the rank of B A cannot be that high, because an adapted matrix has a shorter
    side. `key` is the name of the rank in the message."""
    shapes: dict[str, Shape] = {}
    for rule, hf, _, shape in rule_shapes(model):
        if hf in adapted(rule, adapter):
            shapes.setdefault(module_name(hf), shape)
    if not shapes:  # the shapes of an outside architecture are not known
        return
    least = min(shapes, key=lambda name: min(shapes[name]))
    outputs, inputs = shapes[least]
    if adapter.rank > min(outputs, inputs):
        raise InputError(
            f"{key} is {adapter.rank}, but {least} is {outputs} x {inputs}, so the rank of an update "
            f"is at most {min(outputs, inputs)}; set {key} to at most that"
        )
