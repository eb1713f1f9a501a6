"""Check that the settings of a recipe fit `rollout.true_on_policy`.

With unsuitable settings, the log-probs of trainer and engine would silently differ.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from mrl.config import Recipe
from mrl.errors import InputError
from mrl.preflight.hints import FP32_HEAD
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.implementation import (
    check_batch_invariant,
    choose_dtype,
    choose_implementation,
)

ON_CPUS = ("qwen3_moe",)
"""Names of architectures (`model_type`) that `true_on_policy` supports on CPUs. On CPUs, each of
their layers was compared with SGLang's layer of the same kind."""


def check_on_policy(recipe: Recipe, dims: ParallelDims, model: HfModel) -> None:
    """Raise InputError for the first key with a value that does not work with `rollout.true_on_policy`.

    `rollout.batch_invariant` is the engine's half of `true_on_policy`. If only this half is on,
    only the keys that concern the engine are checked. Nothing is checked if both are off.
    """
    if not recipe.rollout.true_on_policy:
        if recipe.rollout.batch_invariant:
            _refuse("rollout.batch_invariant", _of_engine(recipe), model)
        return
    wanted = [
        ("parallel.tensor_model_parallel_size", dims.tp, 1),
        ("parallel.expert_tensor_parallel_size", dims.etp, 1),
        ("parallel.context_parallel_size", dims.cp, 1),
        ("parallel.moe_token_dispatcher_type", dims.dispatcher, "alltoall"),
        # The trainer rounds logits to the dtype of its weights.
        (
            f"rollout.server_args.{FP32_HEAD}",
            bool(recipe.rollout.server_args.get(FP32_HEAD)),
            False,
        ),
        # Routing weights and expert order need no replay: engine and trainer compute the same ones.
        ("moe.replay", recipe.moe.replay, "ids"),
    ]
    dtype = _dtype(recipe.model.dtype)
    if torch.cuda.is_available():
        implementation, _ = choose_implementation(recipe.model.transformer_impl)
        wanted.append(("model.transformer_impl", implementation, "transformer_engine"))
        check_batch_invariant()
    else:
        wanted.append(("model.dtype", dtype, "float32"))
    # The engine's dtype comes last, because by default it follows from `model.dtype`. If that is wrong,
    # the error should name it.
    wanted += _of_engine(recipe)
    wanted.append(("rollout.dtype", _dtype(recipe.rollout.engine_dtype(recipe.model)), dtype))
    _refuse("rollout.true_on_policy", wanted, model)


def _of_engine(recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """Return (key, value in the recipe, required value) for each key that concerns the engine."""
    rollout = recipe.rollout
    wanted: list[tuple[str, Any, Any]] = [
        ("rollout.engine", rollout.engine, "sglang"),
        # Several ranks would add up numbers in another order than a single rank.
        ("rollout.tensor_parallel_size", rollout.tensor_parallel_size, 1),
        ("rollout.expert_parallel_size", rollout.expert_parallel_size, 1),
        ("rollout.return_routing_weights", rollout.return_routing_weights, False),
    ]
    if not torch.cuda.is_available():
        backend = rollout.server_args.get("attention_backend", "torch_native")
        wanted += [
            ("rollout.dtype", _dtype(rollout.engine_dtype(recipe.model)), "float32"),
            ("rollout.server_args.attention_backend", backend, "torch_native"),
        ]
    return wanted


def _refuse(mode: str, wanted: list[tuple[str, Any, Any]], model: HfModel) -> None:
    for key, value, needed in wanted:
        if value != needed:
            raise InputError(
                f"{key} is {value}, but {mode} needs {needed}; set it, or turn the mode off"
            )
    kind = model.architecture.model_type
    if not torch.cuda.is_available() and kind not in ON_CPUS:
        raise InputError(
            f"{mode} is on, but {model.path} is a {kind} model; on CPUs the mode supports "
            f"{' and '.join(ON_CPUS)} only"
        )


def _dtype(asked: Literal["auto", "float32", "bfloat16"]) -> str:
    return str(choose_dtype(asked)).removeprefix("torch.")
