"""Build this rank's chunks of a Megatron GPTModel from a Hugging Face config, and wrap them in DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel.hf_config import HfModel
from parallel.implementation import Implementation
from parallel.layers import invariant
from parallel.layers.experts import join_storages
from parallel.layers.indexer import FP32_BUFFERS
from parallel.layers.mtp import MtpBlock
from parallel.layers.output_layer import deferred_output_layer
from parallel.layers.specs import block_spec
from parallel.mesh import Mesh

OutputLayer = Callable[[TransformerConfig], torch.nn.Module]


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
    """Build this rank's model chunks, one per virtual stage, on its device and without DDP's
    wrapper.

    `output_layer` makes the layer that replaces the projection onto the vocabulary in the last
    chunk. With `true_on_policy`, mrl's own layers compute each token as the engine does. With
    `experts_in_order`, MoE layers sum the results of a token's experts in the order of its route.
    If `logprob_chunk_tokens` is not 0, the last chunk returns hidden states, and the head computes
    the logits of that many tokens at a time; otherwise it returns all logits.
    """
    dims = mesh.dims
    chunks = []
    for virtual in range(dims.vpp):
        vp_stage = virtual if dims.vpp > 1 else None
        chunk: torch.nn.Module = GPTModel(
            config,
            block_spec(
                config,
                implementation,
                vp_stage,
                true_on_policy,
                experts_in_order,
                model.architecture.norms_whole_projections,
            ),
            vocab_size=model.sizes.vocab_size,
            max_sequence_length=model.context_len,
            position_embedding_type="rope",
            rotary_percent=model.rotary_fraction,
            rotary_base=model.rotary_base,  # pyright: ignore[reportArgumentType]
            rope_scaling=model.rope_scaling_factor is not None,
            rope_scaling_factor=model.rope_scaling_factor or 1.0,
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
        if (num_mtp := model.architecture.num_trained_mtp) and chunk.post_process:
            setattr(chunk, "mtp", MtpBlock(config, implementation, num_mtp, vp_stage))  # noqa: B010
        chunk.model_type = ModelType.encoder_or_decoder
        _flag_experts(chunk, mesh)
        chunk = chunk.to(mesh.device)
        chunk = _half(config, chunk) if config.bf16 else chunk
        join_storages(chunk)
        chunks.append(chunk)
    return chunks


def wrap_chunks(
    chunks: list[Any], config: TransformerConfig, ddp: DistributedDataParallelConfig
) -> list[Any]:
    """Wrap chunks in Megatron's DDP, with gradient buffers for the parameters that now require
    gradients.

    `config` must belong to one model only, because Megatron's schedules read the model's own
    functions from it.
    """
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def _flag_experts(chunk: torch.nn.Module, mesh: Mesh) -> None:
    """Mark the experts' parameters, so that their gradients are reduced over the experts' own
    replicas.

    Megatron does this only if EP > 1. But if ETP < TP, the experts are distributed differently from
    the dense layers too, and without the mark their gradients would be silently wrong. The biases of
    experts get the marks of the weights: Megatron would sum and count them as those of dense layers.
    All ranks that split an expert have its second bias, which the gradient norm counts once.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            setattr(parameter, "allreduce", False)  # noqa: B010
        if ".experts." in name and name.endswith(".bias"):
            setattr(parameter, "sequence_parallel", False)  # noqa: B010
            setattr(parameter, "tensor_model_parallel", True)  # noqa: B010
            setattr(parameter, "shared", "linear_fc2" in name and mesh.etp_rank > 0)  # noqa: B010


def _half(config: TransformerConfig, chunk: torch.nn.Module) -> Float16Module:
    """Convert a chunk to bf16, except the routers' biases and counts and the norms of indexers.

    With a rounded bias a router would choose other experts.
    """
    half = Float16Module(config, chunk)
    for module in chunk.modules():
        for name in ("expert_bias", "local_tokens_per_expert", *FP32_BUFFERS):
            if torch.is_tensor(buffer := getattr(module, name, None)):
                buffer.data = buffer.float()
    return half


def unwrap(chunk: Any) -> GPTModel:
    """Return the GPTModel of a chunk, without the DDP and half-precision wrappers around it."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk
