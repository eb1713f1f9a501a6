"""Build this rank's chunks of a Megatron GPTModel from a Hugging Face config, and wrap them in DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel.hf_config import HfModel
from parallel.implementation import Implementation
from parallel.layers import expert_order, invariant, specs
from parallel.layers.attention import PackedAttention, RotaryAttention
from parallel.layers.dispatch import NativeMoELayer, RouteOrderMoELayer
from parallel.layers.experts import GroupedExperts, join_storages
from parallel.layers.latent_attention import LatentAttention
from parallel.layers.output_layer import deferred_output_layer
from parallel.mesh import Mesh


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
    for layer in spec.layer_specs:
        if not engine:
            _native_layer(layer.submodules, config, true_on_policy, experts_in_order)
        elif experts_in_order:
            expert_order.replace_layer(layer.submodules)
    if not engine:
        spec.layer_norm = SequenceParallelRMSNorm
    return spec


def _native_layer(
    parts: Any, config: TransformerConfig, true_on_policy: bool, experts_in_order: bool
) -> None:
    """Put mrl's modules into the spec of one decoder layer of Megatron's local layers."""
    parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelRMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.multi_latent_attention:
        parts.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = SequenceParallelRMSNorm
    else:
        parts.self_attention.module = RotaryAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
    if specs.has_experts(parts):
        kind = RouteOrderMoELayer if experts_in_order else NativeMoELayer
        parts.mlp = specs.of_module(parts.mlp, kind)
        if not true_on_policy:  # there each expert computes a row as the engine does
            layer = specs.submodules_of(parts.mlp)
            layer.experts = specs.of_module(layer.experts, GroupedExperts)
    if true_on_policy:
        invariant.replace_layers(parts)


def build_chunks(
    model: HfModel,
    mesh: Mesh,
    config: TransformerConfig,
    implementation: Implementation,
    output_layer: OutputLayer | None = None,
    true_on_policy: bool = False,
    experts_in_order: bool = False,
    logprob_chunk_tokens: int = 0,
) -> list[Any]:
    """Build this rank's model chunks (one per virtual stage) on its device, not wrapped yet.

    `output_layer` makes what takes the place of the vocabulary's projection in the last chunk.
    `true_on_policy`: local layers that compute each token as the engine does. `experts_in_order`: add a
    token's experts in the order of its route. `logprob_chunk_tokens`: the last chunk gives hidden
    states, and the head computes the logits of so many tokens at a time; 0: it gives all logits.
    """
    dims = mesh.dims
    chunks = []
    for virtual in range(dims.vpp):
        vp_stage = virtual if dims.vpp > 1 else None
        chunk: torch.nn.Module = GPTModel(
            config,
            _block_spec(config, implementation, vp_stage, true_on_policy, experts_in_order),
            vocab_size=model.sizes.vocab_size,
            max_sequence_length=model.context_len,
            position_embedding_type="rope",
            rotary_base=model.rotary_base,  # pyright: ignore[reportArgumentType]
            share_embeddings_and_output_weights=model.tied_embeddings,
            pre_process=mesh.pp_rank == 0 and virtual == 0,
            post_process=mesh.is_last_stage and virtual == dims.vpp - 1,
            vp_stage=vp_stage,
        )
        if output_layer is not None and chunk.post_process:
            setattr(chunk, "output_layer", output_layer(config))  # noqa: B010
        elif true_on_policy and implementation == "local" and chunk.post_process:
            setattr(chunk, "output_layer", invariant.output_layer(config, chunk.output_layer))  # noqa: B010
        if output_layer is None and logprob_chunk_tokens and chunk.post_process:
            deferred = deferred_output_layer(config, chunk.output_layer, logprob_chunk_tokens)
            setattr(chunk, "output_layer", deferred)  # noqa: B010
        chunk.model_type = ModelType.encoder_or_decoder
        _flag_experts(chunk)
        chunk = chunk.to(mesh.device)
        chunk = _half(config, chunk) if config.bf16 else chunk
        join_storages(chunk)
        chunks.append(chunk)
    return chunks


def wrap_chunks(
    chunks: list[Any], config: TransformerConfig, ddp: DistributedDataParallelConfig
) -> list[Any]:
    """Wrap chunks in Megatron's DDP, with gradient buffers of what is trained in them now.

    Megatron's schedules take the functions of a pass from `config`, that of the wrapper.
    """
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def _flag_experts(chunk: torch.nn.Module) -> None:
    """Mark what is reduced over the experts' own replicas.

    Megatron does so only when EP > 1, yet with ETP < TP experts too are shared out differently from the
    dense layers; without the mark their gradients are silently wrong.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            setattr(parameter, "allreduce", False)  # noqa: B010


def _half(config: TransformerConfig, chunk: torch.nn.Module) -> Float16Module:
    """bf16 but for the routers' biases and counts: a rounded bias chooses other experts."""
    half = Float16Module(config, chunk)
    for module in chunk.modules():
        for name in ("expert_bias", "local_tokens_per_expert"):
            if torch.is_tensor(buffer := getattr(module, name, None)):
                buffer.data = buffer.float()
    return half


def unwrap(chunk: Any) -> GPTModel:
    """Return the GPTModel inside DDP and the half-precision wrapper."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk
