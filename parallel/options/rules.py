"""Check the options under `megatron:` against each other, against the rest of the recipe and against
the machine."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from mrl.errors import InputError
from parallel.dims import ParallelDims
from parallel.implementation import Implementation, can_import
from parallel.options.fields import NEEDS_CUDA, NEEDS_TRANSFORMER_ENGINE
from parallel.options.read import installed_fields, is_off_by_default

SWITCHES: dict[str, tuple[str, ...]] = {
    "optimizer_cpu_offload": (
        "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads"),
    "use_precision_aware_optimizer": (
        "store_param_remainders", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
    "overlap_grad_reduce": ("bucket_size", "overlap_param_gather"),
    "recompute_granularity": ("recompute_modules",),
    "fp8": (
        "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad",
        "fp8_dot_product_attention", "fp8_multi_head_attention", "tp_only_amax_red",
        "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    "fine_grained_activation_offloading": ("offload_modules", "min_offloaded_tensor_size"),
    "cpu_offloading": (
        "cpu_offloading_num_layers", "cpu_offloading_activations",
        "cpu_offloading_double_buffering"),
}  # fmt: skip
"""Maps an option to other options that do nothing unless it is on."""
NEED_DISTRIBUTED = (
    "overlap_param_gather", "use_precision_aware_optimizer", "reduce_scatter_with_fp32_accumulation",
)  # fmt: skip
MOMENT_DTYPES = ("float32", "bfloat16", "float16", "uint8")
STATE_DTYPES = {
    "main_params_dtype": ("float32", "float16"),
    "exp_avg_dtype": MOMENT_DTYPES,
    "exp_avg_sq_dtype": MOMENT_DTYPES,
}
"""Maps options for the dtypes of the optimizer state to the values that TransformerEngine's
FusedAdam supports; uint8 is fp8 with a scale."""
KEEP_BITS = ("recompute_granularity", "recompute_modules", "deallocate_pipeline_outputs",
             "clone_scatter_output_in_embedding", "microbatch_group_size_per_vp_stage",
             "overlap_p2p_comm_warmup_flush", "batch_p2p_sync")  # fmt: skip
"""Options of the model that do not change any bit of its forward pass."""
TRANSFORMER_ENGINE_OFFLOADS = ("expert_fc1", "moe_act")
"""Values of `offload_modules` that only TransformerEngine's grouped experts (`TEGroupedMLP`)
support."""


@dataclass(frozen=True)
class Surroundings:
    """The settings of the recipe and the model, and the implementation of the layers, against which
    the options are checked."""

    dims: ParallelDims
    implementation: Implementation
    dtype: torch.dtype
    distributed_optimizer: bool
    recompute: bool
    """The recipe's `train.recompute`."""
    replays_order: bool
    """Whether `moe.replay` asks to sum the results of a token's experts in the order of the route."""
    true_on_policy: bool
    has_shared_experts: bool


def check_rules(given: Mapping[str, Any], around: Surroundings) -> None:
    """Raise InputError with a one-line message if the options break a rule.

    `given` holds the options as they are in the recipe; `read_options` must have checked each of
    them by itself. An option that turns off something that is off by default is always accepted.
    """
    given = {name: value for name, value in given.items() if not is_off_by_default(name, value)}
    for name in given:
        _check_machine(name, given[name], around)
    for switch, names in SWITCHES.items():
        for name in names:
            if name in given and not given.get(switch):
                raise InputError(
                    f"megatron.{name} is {given[name]!r}, but it does nothing without "
                    f"megatron.{switch}; set that, or leave it out"
                )
    for name in NEED_DISTRIBUTED:
        if given.get(name) and not around.distributed_optimizer:
            raise InputError(
                f"megatron.{name} is true, but optimizer.use_distributed_optimizer is false; set it to "
                "true, or leave the option out"
            )
    _check_optimizer(given, around)
    _check_recompute(given, around)
    _check_model(given, around)
    _check_activations(given, around)


def _check_machine(name: str, value: Any, around: Surroundings) -> None:
    where = f"megatron.{name} is {value!r}, but"
    if name in NEEDS_TRANSFORMER_ENGINE and around.implementation != "transformer_engine":
        raise InputError(
            f"{where} only layers of TransformerEngine have it, and these are {around.implementation}; "
            "leave it out, or train with transformer-engine on a GPU"
        )
    if name in NEEDS_CUDA and not torch.cuda.is_available():
        raise InputError(f"{where} there is no CUDA device; leave it out on this machine")
    if (
        name == "gradient_accumulation_fusion"
        and value
        and not can_import("fused_weight_gradient_mlp_cuda")
    ):
        raise InputError(
            f"{where} the module fused_weight_gradient_mlp_cuda is not installed; build NVIDIA's apex "
            "with --cpp_ext and --cuda_ext, or leave it out"
        )
    flex = ("moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms")
    if name in flex and around.dims.dispatcher != "flex":
        raise InputError(
            f"{where} parallel.moe_token_dispatcher_type is {around.dims.dispatcher}; set that to "
            "flex, or leave this out"
        )


def _check_optimizer(given: Mapping[str, Any], around: Surroundings) -> None:
    offload, aware = given.get("optimizer_cpu_offload"), given.get("use_precision_aware_optimizer")
    fraction = given.get("optimizer_offload_fraction", 0.0)
    if offload and not 0 < fraction <= 1:
        raise InputError(
            f"megatron.optimizer_offload_fraction is {fraction}, expected above 0 and at most 1: the "
            "share of the optimizer's state that megatron.optimizer_cpu_offload keeps on the host"
        )
    if offload and around.dtype == torch.float32 and around.distributed_optimizer:
        raise InputError(
            "megatron.optimizer_cpu_offload is true with float32 weights, of which Megatron's "
            "distributed optimizer gives it views that it cannot step; set model.dtype=bfloat16 or "
            "optimizer.use_distributed_optimizer=false"
        )
    if offload and around.dtype == torch.bfloat16 and not around.distributed_optimizer:
        raise InputError(
            "megatron.optimizer_cpu_offload is true with bfloat16 weights, whose main parameters "
            "Megatron makes too late for it without the distributed optimizer; set "
            "optimizer.use_distributed_optimizer=true"
        )
    if aware and around.dtype != torch.bfloat16:
        raise InputError(
            f"megatron.use_precision_aware_optimizer is true, but the weights are "
            f"{_dtype(around.dtype)}; set model.dtype=bfloat16, or leave it out"
        )
    if aware and not offload and not fused_adam_keeps_dtypes():
        raise InputError(
            "megatron.use_precision_aware_optimizer is true, but TransformerEngine's FusedAdam, which "
            "keeps such state, is not installed; install transformer-engine, add "
            "optimizer_cpu_offload=true, or leave it out"
        )
    _check_state_dtypes(given)
    if given.get("decoupled_weight_decay") is False and (offload or around.distributed_optimizer):
        other = (
            "megatron.optimizer_cpu_offload" if offload else "optimizer.use_distributed_optimizer"
        )
        raise InputError(
            f"megatron.decoupled_weight_decay is false, but {other} is on, for which Megatron has "
            "AdamW only; leave one of them out"
        )
    _check_gradient_buffers(given)


def _check_state_dtypes(given: Mapping[str, Any]) -> None:
    offload = given.get("optimizer_cpu_offload")
    for name, choices in STATE_DTYPES.items():
        if name not in given:
            continue
        if offload:
            raise InputError(
                f"megatron.{name} is {given[name]}, but Megatron keeps float32 where "
                "megatron.optimizer_cpu_offload is on; leave one of them out"
            )
        if given[name] not in choices:
            raise InputError(
                f"megatron.{name} is {given[name]}, expected one of {', '.join(choices)}"
            )


def _check_gradient_buffers(given: Mapping[str, Any]) -> None:
    size = given.get("bucket_size")
    if size is not None and size < 1:
        raise InputError(
            f"megatron.bucket_size is {size}, expected at least 1 (parameters in a bucket)"
        )
    if given.get("reduce_scatter_with_fp32_accumulation") and given.get(
        "grad_reduce_in_fp32", True
    ):
        raise InputError(
            "megatron.reduce_scatter_with_fp32_accumulation is true, but gradients are reduced in "
            "float32 already; add grad_reduce_in_fp32=false, or leave it out"
        )


def _check_recompute(given: Mapping[str, Any], around: Surroundings) -> None:
    granularity = given.get("recompute_granularity")
    if granularity == "full":
        raise InputError(
            "megatron.recompute_granularity is 'full'; use train.recompute=true for that"
        )
    if granularity and around.recompute:
        raise InputError(
            "megatron.recompute_granularity is 'selective', but train.recompute is true, which "
            "recomputes everything; leave one of them out"
        )


def _check_model(given: Mapping[str, Any], around: Surroundings) -> None:
    if around.true_on_policy:
        transformer = [name for name in given if "transformer" in installed_fields()[name]]
        for name in transformer:
            if name not in KEEP_BITS:
                raise InputError(
                    f"megatron.{name} is {given[name]!r}, but rollout.true_on_policy needs the layers "
                    "that the engine has; leave one of them out"
                )
    if given.get("moe_shared_expert_overlap"):
        if not around.has_shared_experts:
            raise InputError(
                "megatron.moe_shared_expert_overlap is true, but the model has no shared experts; "
                "leave it out"
            )
        if around.replays_order:
            raise InputError(
                "megatron.moe_shared_expert_overlap is true, but moe.replay asks for the order of the "
                "experts, which mrl's own layer adds up; leave one of them out"
            )
    for name in ("microbatch_group_size_per_vp_stage", "overlap_p2p_comm_warmup_flush"):
        if name in given and around.dims.vpp == 1:
            raise InputError(
                f"megatron.{name} is {given[name]!r}, but there are no virtual stages; set "
                "parallel.virtual_pipeline_model_parallel_size, or leave it out"
            )
    if given.get("fp8"):
        if around.dtype != torch.bfloat16:
            raise InputError(
                f"megatron.fp8 is {given['fp8']}, but model.dtype is {_dtype(around.dtype)}; set it to "
                "bfloat16"
            )
        if given.get("fp8_recipe", "delayed") in ("delayed", "custom", None):
            raise InputError(
                f"megatron.fp8_recipe is {given.get('fp8_recipe', 'delayed')}, whose scales live "
                "between steps and are in no checkpoint; set tensorwise, blockwise or mxfp8"
            )


def _check_activations(given: Mapping[str, Any], around: Surroundings) -> None:
    """Raise InputError for an option that keeps activations in 8 bits or on the host, if the layers
    do not support it."""
    fuses = given.get("bias_activation_fusion", torch.cuda.is_available())
    if given.get("activation_func_fp8_input_store") and not fuses:
        raise InputError(
            "megatron.activation_func_fp8_input_store is true, but only the fused SwiGLU does that; "
            "add bias_activation_fusion=true (the default with CUDA), or leave it out"
        )
    of_engine = [n for n in given.get("offload_modules") or () if n in TRANSFORMER_ENGINE_OFFLOADS]
    if of_engine and around.implementation != "transformer_engine":
        raise InputError(
            f"megatron.offload_modules has {', '.join(of_engine)}, but only TransformerEngine's "
            f"experts move that, and these are {around.implementation}; leave it out, or train with "
            "transformer-engine"
        )


@cache
def fused_adam_keeps_dtypes() -> bool:
    """Return whether TransformerEngine is installed and its FusedAdam lets the caller choose the
    dtypes of the optimizer state."""
    try:
        from transformer_engine.pytorch.optimizers import (  # pyright: ignore[reportMissingImports]
            FusedAdam,
        )
    except Exception:  # a broken TransformerEngine may raise anything
        return False
    return "exp_avg_dtype" in inspect.signature(FusedAdam).parameters


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
