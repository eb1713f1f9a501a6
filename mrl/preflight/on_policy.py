"""Checks a recipe with `rollout.true_on_policy`: other settings would lose the equality silently."""

from __future__ import annotations

from typing import Literal

import torch

from mrl.config import Recipe
from mrl.errors import InputError
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.implementation import (
    check_invariant_engine,
    choose_dtype,
    choose_implementation,
)

ON_CPUS = ("qwen3_moe",)
"""The architectures that were compared with SGLang's layer by layer."""


def check_on_policy(recipe: Recipe, dims: ParallelDims, model: HfModel) -> None:
    """Raises InputError with the first key that does not go with `rollout.true_on_policy`."""
    if not recipe.rollout.true_on_policy:
        return
    on_cpu = not torch.cuda.is_available()
    wanted = [
        ("rollout.engine", recipe.rollout.engine, "sglang"),
        # A sum over ranks adds in another order than the engine's.
        ("rollout.tensor_parallel_size", recipe.rollout.tensor_parallel_size, 1),
        ("rollout.expert_parallel_size", recipe.rollout.expert_parallel_size, 1),
        ("parallel.tensor_model_parallel_size", dims.tp, 1),
        ("parallel.expert_tensor_parallel_size", dims.etp, 1),
        ("parallel.context_parallel_size", dims.cp, 1),
        ("parallel.moe_token_dispatcher_type", dims.dispatcher, "alltoall"),
        # There is nothing left to replay: the engine has the trainer's weights and order.
        ("moe.replay", recipe.moe.replay, "ids"),
        ("rollout.return_routing_weights", recipe.rollout.return_routing_weights, False),
    ]
    backend = recipe.rollout.server_args.get("attention_backend", "torch_native")
    implementation, _ = choose_implementation(recipe.model.transformer_impl)
    dtype = _dtype(recipe.model.dtype)
    if on_cpu:
        wanted += [
            ("model.dtype", dtype, "float32"),
            ("rollout.server_args.attention_backend", backend, "torch_native"),
        ]
    else:
        wanted.append(("model.transformer_impl", implementation, "transformer_engine"))
        check_invariant_engine()
    wanted.append(("rollout.dtype", _dtype(recipe.rollout.engine_dtype(recipe.model)), dtype))
    for key, value, needed in wanted:
        if value != needed:
            raise InputError(
                f"{key} is {value}, but rollout.true_on_policy needs {needed}; set it, or turn the "
                "mode off"
            )
    kind = model.architecture.model_type
    if on_cpu and kind not in ON_CPUS:
        raise InputError(
            f"rollout.true_on_policy is on, but {model.path} is a {kind} model; on CPUs it is for "
            f"{' and '.join(ON_CPUS)}"
        )


def _dtype(asked: Literal["auto", "float32", "bfloat16"]) -> str:
    return str(choose_dtype(asked)).removeprefix("torch.")
