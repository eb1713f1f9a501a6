"""Check a recipe's `megatron:` section: names, types, mrl's rules, and Megatron's own rules."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from mrl.config import Recipe
from mrl.errors import InputError
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.implementation import choose_dtype, choose_implementation, impl_for
from parallel.options.read import MegatronOptions, read_options
from parallel.options.rules import Surroundings, check_rules


def with_native_layers(recipe: Recipe, model: HfModel) -> Recipe:
    """Return the recipe with `model.transformer_impl: local` if the model needs mrl's own layers, and
    otherwise as it is. Raises InputError if the recipe asks for TransformerEngine's."""
    return with_layers(recipe, impl_for(recipe.model.transformer_impl, model.architecture))


def with_layers(recipe: Recipe, asked: str) -> Recipe:
    """Return the recipe with `model.transformer_impl: asked`."""
    chosen = recipe.model.model_copy(update={"transformer_impl": asked})
    return recipe.model_copy(update={"model": chosen})


def check_megatron(
    recipe: Recipe, dims: ParallelDims, model: HfModel, *, elsewhere: bool = False
) -> None:
    """Raise InputError for options that mrl or Megatron refuses.

    InputError is also raised if the flex token dispatcher cannot run here. Megatron is imported
    only if the recipe has options for Megatron. `elsewhere`: the recipe is for GPUs that this
    machine does not have; check only the names and types of the options.
    """
    if elsewhere:
        read_options(recipe.megatron)
        return
    _check_flex(dims)
    if not recipe.megatron:
        return
    options = read_options(recipe.megatron)
    implementation, _ = choose_implementation(recipe.model.transformer_impl)
    around = Surroundings(
        dims=dims,
        implementation=implementation,
        dtype=choose_dtype(recipe.model.dtype),
        distributed_optimizer=recipe.optimizer.divides_ranges,
        recompute=recipe.train.recompute,
        replays_order="order" in recipe.moe.replay,
        true_on_policy=recipe.rollout.true_on_policy,
        has_shared_experts=model.sizes.shared_expert_ffn_size > 0,
    )
    check_rules(recipe.megatron, around)
    _check_with_megatron(recipe, around, model, options)


def _check_flex(dims: ParallelDims) -> None:
    if dims.dispatcher != "flex":
        return
    where = "parallel.moe_token_dispatcher_type is flex, but"
    if importlib.util.find_spec("deep_ep") is None:
        raise InputError(f"{where} deep_ep is not installed; install DeepEP, or set it to alltoall")
    if not torch.cuda.is_available():
        raise InputError(f"{where} there is no CUDA device; set it to alltoall")
    if dims.tp * dims.ep == 1:
        raise InputError(
            f"{where} expert and tensor parallel sizes are 1, and it only moves tokens between ranks; "
            "set it to alltoall"
        )


def _check_with_megatron(
    recipe: Recipe, around: Surroundings, model: HfModel, options: MegatronOptions
) -> None:
    """Build the config dataclasses that the run will build, so that Megatron checks its own rules.

    Only the dataclasses for which the recipe has options are built. Raises InputError if Megatron
    rejects one of them.
    """
    from parallel.optimizer.setup import build_optimizer_config
    from parallel.transformer_config import build_config, build_ddp_config

    distributed = around.distributed_optimizer
    builders: dict[str, Any] = {
        "transformer": lambda: build_config(
            model,
            around.dims,
            torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            around.dtype,
            around.implementation,
            around.recompute,
            recipe.moe.expert_bias_update_rate,
            options=options,
        ),
        "ddp": lambda: build_ddp_config(distributed, options),
        "optimizer": lambda: build_optimizer_config(
            recipe.optimizer, around.dtype, distributed, options
        ),
    }
    for part, build in builders.items():
        given = getattr(options, part)
        if not given:
            continue
        try:
            build()
        except (ValueError, AssertionError, RuntimeError, ImportError, TypeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"megatron: megatron-core does not accept {', '.join(given)} together with the rest of "
                f"the recipe: {reason}"
            ) from None
