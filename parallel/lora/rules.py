"""Determine the parameters of an adapter: read `lora.targets`, and derive the adapter's rules and
shapes from the model's rules.

Each adapted Hugging Face weight has its own A and B, even if Megatron joins several weights in one
layer (query, key and value; gate and up). The layer's rule determines how A and B are split over
tensor-parallel ranks. If the layer's weight is split by rows, B is split by rows and every rank has
the whole A. If the weight is split by columns, A is split by columns and every rank has the whole B.
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
"""Matches the weights of Megatron's linear layers. Embeddings, norms, routers and the output layer
have other names."""
SHARED = "shared_outer"
"""The submodule of an MoE layer that holds the matrices that its experts share."""
UNSUPPORTED = {
    "gate": "the router stays that of the base: SGLang cannot serve an adapter of it",
    "lm_head": "the output layer stays that of the base: an adapter of it would need code of its own",
    **dict.fromkeys(
        ("wq_b", "wk", "weights_proj"), "the indexer stays that of the base: it is never trained"
    ),
    "embed_tokens": "the embedding stays that of the base: an adapter of it would need code of its own",
}


def module_name(hf_name: str) -> str:
    """Return the last part of the module name of the weight `hf_name`, for example `q_proj`."""
    return hf_name.removesuffix(".weight").rpartition(".")[2]


def is_adapter(name: str) -> bool:
    """Return whether a Megatron parameter belongs to an adapter."""
    return ".lora." in name or f".{SHARED}." in name


def is_shared(rule: Rule, adapter: Adapter, matrix: Literal["A", "B"]) -> bool:
    """Return whether the experts of a layer share `matrix` of the linear layer of `rule`."""
    outer = "B" if rule.split == "columns" else "A"
    return "{expert}" in rule.megatron and adapter.experts == "shared_outer" and matrix == outer


def adapted(rule: Rule, adapter: Adapter) -> list[str]:
    """Return the names of those Hugging Face weights of a rule to which the adapter adds an
    update."""
    if not LINEAR.search(rule.megatron):
        return []
    names = adapter.expert_modules if "{expert}" in rule.megatron else adapter.modules
    return [hf for hf in rule.hf if module_name(hf) in names]


def adapter_rules(rules: Iterable[Rule], adapter: Adapter) -> list[Rule]:
    """Return the rules of an adapter: for each matrix A or B one rule, which maps its Megatron name
    to its PEFT name. `rules` are the rules of the model."""
    found: dict[str, Rule] = {}
    for rule in rules:
        for hf in adapted(rule, adapter):
            for one in adapter_pair(rule, hf, adapter):
                found[one.megatron] = one
    return list(found.values())


def adapter_pair(rule: Rule, hf: str, adapter: Adapter) -> Iterator[Rule]:
    """Yield the rule of A, then the rule of B, for the adapted Hugging Face weight `hf` of `rule`."""
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
    """Return the adapter that the recipe asks for. The target `attention` stands for all attention
    modules of the model.

    Raises InputError for a module that the model lacks or that cannot have an adapter, for
    `lora.experts` in a model without experts, and if nothing would be trained.
    """
    attention: dict[str, None] = {}
    others: dict[str, None] = {}
    experts: dict[str, None] = {}
    # An architecture also has rules for layers that this model may lack (dense ones, latents).
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
    """Raise InputError if the adapter's rank exceeds the shorter side of an adapted weight, because
    `B A` cannot have a higher rank than that.

    `key` is the name of the rank in the message. Weights whose shapes are unknown are not checked.
    """
    shapes: dict[str, Shape] = {}
    for rule, hf, _, shape in rule_shapes(model):
        if hf in adapted(rule, adapter):
            shapes.setdefault(module_name(hf), shape)
    if not shapes:  # the shapes of a user's own architecture may be unknown
        return
    least = min(shapes, key=lambda name: min(shapes[name]))
    outputs, inputs = shapes[least]
    if adapter.rank > min(outputs, inputs):
        raise InputError(
            f"{key} is {adapter.rank}, but {least} is {outputs} x {inputs}, so the rank of an update "
            f"is at most {min(outputs, inputs)}; set {key} to at most that"
        )


def adapter_shapes(model: HfModel, adapter: Adapter) -> dict[str, tuple[int, int]]:
    """Return, by PEFT's name, the shape of every A [rank, inputs] and B [outputs, rank] that the
    adapter has in the model."""
    return {name: shape for name, _, shape in _matrices(model, adapter)}


def names_in_files(model: HfModel, adapter: Adapter) -> dict[str, list[str]]:
    """Return a dict from the name of each matrix of `adapter_shapes` to the names that it has in a
    file.

    A matrix that experts share has one name for each expert, and any other matrix has one name.
    """
    found: dict[str, list[str]] = {}
    for name, in_file, _ in _matrices(model, adapter):
        found.setdefault(name, []).append(in_file)
    return found


def _matrices(model: HfModel, adapter: Adapter) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield (PEFT's name, name in a file, shape) for each matrix A and B of the adapter. A matrix
    that experts share is yielded once for each expert, because a file has it under one name per
    expert."""
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
