"""Check the settings of LoRA. All functions raise InputError if a check fails."""

from __future__ import annotations

from pathlib import Path

import torch

from mrl.config import Recipe
from mrl.config.adapter import Adapter
from mrl.engines.sglang.adapter.limits import refuse_layout, refuse_modules
from mrl.errors import InputError
from mrl.preflight.megatron import with_layers, with_native_layers
from mrl.preflight.releases import check_serves_adapters
from mrl.preflight.roles import Roles
from parallel.expected_tensors import rule_shapes
from parallel.hf_config import HfModel
from parallel.lora.peft_folder import PeftFolder
from parallel.lora.rules import check_rank, module_name, read_adapter


def check_lora(
    recipe: Recipe, model: HfModel, num_nodes: int = 1, *, on_gpu: bool = True
) -> Adapter | None:
    """Return the adapter that the recipe trains; None if the recipe trains all weights.

    `num_nodes` is the number of nodes that one engine spans; `on_gpu`: whether it runs on GPUs.
    """
    if recipe.lora is None:
        return None
    for key, is_set, why in (
        (
            "model.transformer_impl=transformer_engine",
            recipe.model.transformer_impl == "transformer_engine",
            "only mrl's native layers support adapters; leave it at auto",
        ),
        (
            "rollout.true_on_policy=true",
            recipe.rollout.true_on_policy,
            "its layers have no low-rank update; leave it out",
        ),
        (
            f"rollout.quantization={recipe.rollout.quantization} with lora.rollout=adapter",
            recipe.rollout.quantization != "none" and recipe.lora.rollout == "adapter",
            "an adapter is not served on a quantised base; use lora.rollout=merged, or none",
        ),
        (
            f"moe.expert_bias_update_rate={recipe.moe.expert_bias_update_rate}",
            recipe.moe.expert_bias_update_rate > 0,
            "it would change the base model, which is frozen; set it to 0",
        ),
        (
            f"algorithm.reference_path={recipe.algorithm.reference_path}",
            recipe.algorithm.reference_path is not None,
            "the reference of an adapter is its base model without the adapter; leave it out",
        ),
        (
            "optimizer.name=muon",
            recipe.optimizer.name == "muon",
            "A and B are factors of an update, and Muon's rule is for whole matrices; leave it at adam",
        ),
        (
            "megatron.overlap_param_gather=true",
            bool(recipe.megatron.get("overlap_param_gather")),
            "it needs hooks that the matrices of an adapter do not have; leave it out",
        ),
    ):
        if is_set:
            raise InputError(f"{key} does not go with lora: {why}")
    adapter = read_adapter(recipe.lora, model)
    check_rank(adapter, model)
    _check_served(recipe, adapter, model, num_nodes, on_gpu=on_gpu)
    if recipe.lora.path is not None:
        PeftFolder(Path(recipe.lora.path), adapter, model).check_numbers()
    return adapter


def _check_served(
    recipe: Recipe, adapter: Adapter, model: HfModel, num_nodes: int, *, on_gpu: bool
) -> None:
    """Check that SGLang can serve the adapter.

    Nothing is checked with another engine, with `lora.rollout: merged`, or if rollouts are loaded
    instead of generated.
    """
    assert recipe.lora is not None
    starts_engine = recipe.debug.load_rollouts is None and recipe.rollout.engine == "sglang"
    if starts_engine and recipe.lora.rollout == "adapter":
        check_serves_adapters()
        if adapter.experts != "none" and model.architecture.stacked:
            raise InputError(
                f"lora.rollout=adapter with lora.experts={adapter.experts}: SGLang keeps gate and "
                f"up rows of a {model.architecture.model_type} model's experts in turns, which its "
                "adapters of experts do not; set lora.experts=none or lora.rollout=merged"
            )
        if model.sizes.has_linear_attention:
            raise InputError(
                f"lora.rollout=adapter: SGLang has no sizes for adapters of a "
                f"{model.architecture.model_type}, whose projections have output gates; set "
                "lora.rollout=merged"
            )
        refuse_modules(adapter, {module_name(hf) for _, hf, *_ in rule_shapes(model)})
        refuse_layout(recipe.rollout, adapter, num_nodes, on_gpu=on_gpu)


def read_lora(
    recipe: Recipe, model: HfModel, roles: Roles, *, elsewhere: bool
) -> tuple[Adapter | None, Recipe]:
    """Return the adapter that the recipe trains, and the recipe with `model.transformer_impl: local`.
    `elsewhere`: the recipe is for GPUs that this machine does not have.

    Only mrl's native (`local`) layers support adapters. Without an adapter, return None and the
    recipe, which is changed only if the model needs these layers.
    """
    has_engine = recipe.lora is not None and recipe.debug.load_rollouts is None
    num_nodes = roles.engine_layout(recipe.rollout).num_nodes if has_engine else 1
    on_gpu = elsewhere or torch.cuda.is_available()
    adapter = check_lora(recipe, model, num_nodes, on_gpu=on_gpu)
    if adapter is None:
        return None, with_native_layers(recipe, model)
    return adapter, with_layers(recipe, "local")
