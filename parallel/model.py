"""Build this rank's chunks of a Megatron GPTModel from a Hugging Face config, wrapped in DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from parallel import expert_order, invariant
from parallel.attention import PackedAttention
from parallel.groups import Groups
from parallel.hf_config import HfModel
from parallel.implementation import Implementation
from parallel.latent_attention import LatentAttention


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight gradient Megatron sums over the sequence-parallel ranks.

    Megatron's own torch norm refuses sequence parallelism; this one enters through the layer spec.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> None:
        super().__init__(
            hidden_size, eps=eps, dtype=config.params_dtype, device=torch.get_default_device()
        )
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


OutputLayer = Callable[[TransformerConfig], torch.nn.Module]


def build_config(
    model: HfModel,
    groups: Groups,
    dtype: torch.dtype,
    implementation: Implementation,
    recompute: bool,
    expert_bias_update_rate: float,
    true_on_policy: bool = False,
) -> TransformerConfig:
    dims = groups.dims
    half = dtype is torch.bfloat16
    settings: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": half,
        "use_cpu_initialization": groups.device.type == "cpu",
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
        "moe_router_load_balancing_type": "none",  # parallel.balancing adds what the recipe asks for
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
        settings |= invariant.settings(groups.device)
    settings |= model.architecture.transformer_config(model.config)
    latent = settings.get("multi_latent_attention")
    return (MLATransformerConfig if latent else TransformerConfig)(**settings)


def _block_spec(
    config: TransformerConfig,
    implementation: Implementation,
    vp_stage: int | None,
    true_on_policy: bool,
    experts_in_order: bool,
) -> Any:
    engine = implementation == "transformer_engine"
    spec: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    if experts_in_order:
        for layer in spec.layer_specs:
            expert_order.replace_layer(layer.submodules)
    if engine:
        return spec
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelRMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.multi_latent_attention:
            parts.self_attention.module = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = SequenceParallelRMSNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
        if true_on_policy:
            invariant.replace_layers(parts)
    spec.layer_norm = SequenceParallelRMSNorm
    return spec


def build_chunks(
    model: HfModel,
    groups: Groups,
    config: TransformerConfig,
    implementation: Implementation,
    use_distributed_optimizer: bool,
    output_layer: OutputLayer | None = None,
    true_on_policy: bool = False,
    experts_in_order: bool = False,
) -> list[DistributedDataParallel]:
    """This rank's model chunks (one per virtual stage), on its device, with gradient buffers.

    `output_layer` makes what takes the place of the vocabulary's projection in the last chunk.
    `true_on_policy`: local layers that compute each token as the engine does. `experts_in_order`: add a
    token's experts in the order of its route.
    """
    dims = groups.dims
    chunks = []
    for virtual in range(dims.vpp):
        vp_stage = virtual if dims.vpp > 1 else None
        chunk: torch.nn.Module = GPTModel(
            config,
            _block_spec(config, implementation, vp_stage, true_on_policy, experts_in_order),
            vocab_size=model.config["vocab_size"],
            max_sequence_length=model.context_len,
            position_embedding_type="rope",
            rotary_base=model.rotary_base,  # pyright: ignore[reportArgumentType]
            share_embeddings_and_output_weights=model.tied_embeddings,
            pre_process=groups.pp_rank == 0 and virtual == 0,
            post_process=groups.is_last_stage and virtual == dims.vpp - 1,
            vp_stage=vp_stage,
        )
        if output_layer is not None and chunk.post_process:
            setattr(chunk, "output_layer", output_layer(config))  # noqa: B010
        elif true_on_policy and implementation == "local" and chunk.post_process:
            setattr(chunk, "output_layer", invariant.output_layer(config, chunk.output_layer))  # noqa: B010
        chunk.model_type = ModelType.encoder_or_decoder
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                # Megatron flags experts only when EP > 1, yet with ETP < TP they too are shared out
                # differently from the dense layers; unflagged, their gradients are silently wrong.
                setattr(parameter, "allreduce", False)  # noqa: B010
        chunk = chunk.to(groups.device)
        chunks.append(_half(config, chunk) if config.bf16 else chunk)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=use_distributed_optimizer,
        check_for_nan_in_grad=False,  # raises on one rank while others wait: see TrainedModel
    )
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def _half(config: TransformerConfig, chunk: torch.nn.Module) -> Float16Module:
    """bf16 but for the routers' biases and counts: a rounded bias chooses other experts."""
    half = Float16Module(config, chunk)
    for module in chunk.modules():
        for name in ("expert_bias", "local_tokens_per_expert"):
            if torch.is_tensor(buffer := getattr(module, name, None)):
                buffer.data = buffer.float()
    return half


def unwrap(chunk: Any) -> GPTModel:
    """The GPTModel inside DDP and the half-precision wrapper."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk
