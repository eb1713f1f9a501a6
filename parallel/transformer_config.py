"""Derive Megatron's settings for a model and its gradient buffers from config.json and the recipe."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.implementation import Implementation, fusions
from parallel.layers import invariant
from parallel.options.read import MegatronOptions

ATTRIBUTES = ("position_embedding_type", "yarn_")
"""The prefixes of the settings that Megatron's GPTModel reads from attributes of the TransformerConfig,
which has no fields for them."""


def build_config(
    model: HfModel,
    dims: ParallelDims,
    device: torch.device,
    dtype: torch.dtype,
    implementation: Implementation,
    recompute: bool,
    expert_bias_update_rate: float,
    true_on_policy: bool = False,
    options: MegatronOptions = MegatronOptions(),  # noqa: B008
) -> TransformerConfig:
    """Return Megatron's settings for a model. The recipe's `options` override all other settings.

    Megatron may raise any exception for options that it cannot combine.
    """
    half = dtype is torch.bfloat16
    settings: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": half,
        "use_cpu_initialization": device.type == "cpu",
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
        "virtual_pipeline_model_parallel_size": dims.vpp if dims.vpp > 1 else None,
        "context_parallel_size": dims.cp,
        "expert_model_parallel_size": dims.ep,
        "expert_tensor_parallel_size": dims.etp,
        "sequence_parallel": dims.sequence_parallel,
        "num_layers_in_first_pipeline_stage": dims.first_layers,
        "num_layers_in_last_pipeline_stage": dims.last_layers,
        "variable_seq_lengths": not dims.equal_micro_batches,
        # Batched p2p is silently wrong in the interleaved schedule: use the overlapped form there.
        "overlap_p2p_comm": dims.vpp > 1,
        "batch_p2p_comm": dims.vpp == 1,
        "moe_token_dispatcher_type": dims.dispatcher,
        "moe_router_load_balancing_type": "none",  # layers/balancing.py adds what the recipe asks for
        "moe_router_bias_update_rate": expert_bias_update_rate,  # 0 keeps the bias as it was loaded
        "moe_router_dtype": "fp32" if half else None,
        "moe_grouped_gemm": implementation == "transformer_engine" and model.sizes.num_experts > 0,
        # Losses are sums that carry their own normaliser: Megatron must not divide by anything.
        "calculate_per_token_loss": True,
    }
    if recompute:
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if true_on_policy:
        settings |= invariant.settings(device)
    settings |= model.architecture.transformer_config(model.config)
    latent = bool(settings.get("multi_latent_attention"))
    settings |= fusions(implementation, device, dtype, latent, true_on_policy)
    settings |= options.transformer
    if settings["activation_func"] == "quick_gelu":
        settings["activation_func"] = quick_gelu
    names = [] if latent else [name for name in settings if name.startswith(ATTRIBUTES)]
    attributes = {name: settings.pop(name) for name in names}
    config = (MLATransformerConfig if latent else TransformerConfig)(**settings)
    for name, value in attributes.items():
        setattr(config, name, value)
    return config


def build_ddp_config(
    use_distributed_optimizer: bool,
    options: MegatronOptions = MegatronOptions(),  # noqa: B008
) -> DistributedDataParallelConfig:
    """Return Megatron's settings for the gradient buffers and their reduction. The recipe's
    `options` override all other settings."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=use_distributed_optimizer,
        check_for_nan_in_grad=False,  # it raises on one rank while others wait; see BackwardWatch
    )
    return dataclasses.replace(ddp, **options.ddp)
