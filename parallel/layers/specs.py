"""The modules that mrl puts into Megatron's layer specs, for both forms of a spec.

A spec names a class and the submodules with which the class is built. A spec is either a
`ModuleSpec` or a `functools.partial` of the class: megatron-core 0.16 has the first form
everywhere, and 0.19 has the second form for a layer's `mlp` and everything below it.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from parallel.implementation import Implementation
from parallel.layers import invariant
from parallel.layers.attention import PackedAttention, RotaryAttention
from parallel.layers.dispatch import NativeMoELayer, OrderedMoELayer
from parallel.layers.experts import GroupedExperts
from parallel.layers.gated_delta_net import gated_delta_net_spec
from parallel.layers.latent_attention import LatentAttention, SparseAttention
from parallel.layers.projection_norm import normalise_projections
from parallel.layers.sinks import SinkAttention


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """An RMSNorm whose weight gradient Megatron sums over the sequence-parallel ranks.

    Megatron's own torch norm refuses sequence parallelism, and weights around zero
    (`layernorm_zero_centered_gamma`), to which the norm adds 1 in fp32.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> None:
        super().__init__(
            hidden_size, eps=eps, dtype=config.params_dtype, device=torch.get_default_device()
        )
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        self.is_zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_zero_centered:
            return super().forward(x)
        weight = self.weight.float() + 1
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


def block_spec(
    config: TransformerConfig,
    implementation: Implementation,
    vp_stage: int | None,
    true_on_policy: bool,
    experts_in_order: bool,
    norms_whole_projections: bool = False,
) -> Any:
    """Return the spec of one chunk's decoder layers.

    With `true_on_policy`, mrl's own layers compute each token as the engine does. With
    `experts_in_order`, MoE layers sum the results of a token's experts in the order of its route.
    With `norms_whole_projections`, the norms of queries and keys are over all heads together.
    """
    spec = _full_attention_spec(
        config, implementation, vp_stage, true_on_policy, experts_in_order, norms_whole_projections
    )
    if config.linear_attention_freq is not None:
        is_linear = linear_layers(config, vp_stage)
        pairs = zip(spec.layer_specs, is_linear, strict=True)
        spec.layer_specs = [_with_delta_net(layer) if each else layer for layer, each in pairs]
    return spec


def mtp_layer_spec(
    config: TransformerConfig, implementation: Implementation, vp_stage: int | None
) -> Any:
    """Return the spec of a multi-token-prediction layer's decoder layer: that of the chunk's last
    layer, but always with full attention and experts. `vp_stage` is that of the model's last chunk.

    Nothing in an engine has to agree with it, so it is the same with `true_on_policy`.
    """
    sparse = copy.copy(config)
    sparse.moe_layer_freq = 1  # experts in every layer
    spec = _full_attention_spec(sparse, implementation, vp_stage, False, False, False)
    return spec.layer_specs[-1]


def _full_attention_spec(
    config: TransformerConfig,
    implementation: Implementation,
    vp_stage: int | None,
    true_on_policy: bool,
    experts_in_order: bool,
    norms_whole_projections: bool,
) -> Any:
    """Return `block_spec` with full attention in all layers."""
    engine = implementation == "transformer_engine"
    spec: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        parts = layer.submodules
        if not engine:
            _native_layer(parts, config, true_on_policy, experts_in_order)
        elif experts_in_order and _has_experts(parts):
            parts.mlp = _of_module(parts.mlp, OrderedMoELayer)
        if norms_whole_projections:
            normalise_projections(parts.self_attention.submodules, config)
    if not engine:
        spec.layer_norm = SequenceParallelRMSNorm
    return spec


def linear_layers(config: TransformerConfig, vp_stage: int | None) -> list[bool]:
    """Return, for each decoder layer of one chunk, whether its attention is linear
    (`linear_attention_freq` is a list)."""
    pattern: Any = config.linear_attention_freq
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return [bool(each) for each in pattern[first : first + count]]


def _with_delta_net(layer: Any) -> Any:
    """Return the spec of the same layer with a gated delta net. Layers may share one spec."""
    attention = gated_delta_net_spec(layer.submodules.self_attention.submodules)
    parts = dataclasses.replace(layer.submodules, self_attention=attention)
    return dataclasses.replace(layer, submodules=parts)


def _native_layer(
    parts: Any, config: TransformerConfig, true_on_policy: bool, experts_in_order: bool
) -> None:
    """Put mrl's modules into the spec of one of Megatron's local decoder layers."""
    parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelRMSNorm
    attention = parts.self_attention.submodules
    has_sinks = config.softmax_type == "learnable"
    attention.core_attention = SinkAttention if has_sinks else PackedAttention
    if config.dsa_indexer_topk is not None:
        attention.core_attention = SparseAttention
    if config.multi_latent_attention:
        parts.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = SequenceParallelRMSNorm
    else:
        parts.self_attention.module = RotaryAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
    if _has_experts(parts):
        parts.mlp = _of_module(parts.mlp, NativeMoELayer, in_route_order=experts_in_order)
        if not true_on_policy:  # there each expert computes a row as the engine does
            layer = _submodules_of(parts.mlp)
            layer.experts = _of_module(layer.experts, GroupedExperts)
    if true_on_policy:
        _invariant_layer(parts)


def _invariant_layer(parts: Any) -> None:
    """Put the layers of `invariant.py` into the spec of one native decoder layer."""
    attention = parts.self_attention.submodules
    attention.linear_qkv = invariant.InvariantColumnLinear
    attention.core_attention = invariant.InvariantAttention
    attention.linear_proj = invariant.InvariantRowLinear
    feed_forward = _submodules_of(parts.mlp)
    if _has_experts(parts):
        feed_forward.router = invariant.InvariantRouter
        feed_forward = _submodules_of(feed_forward.experts)
    feed_forward.linear_fc1 = invariant.InvariantColumnLinear
    feed_forward.linear_fc2 = invariant.InvariantRowLinear


def _has_experts(parts: Any) -> bool:
    """Return whether the decoder layer with these submodules is an MoE layer, not a dense one."""
    kind = parts.mlp.func if isinstance(parts.mlp, partial) else parts.mlp.module
    return isinstance(kind, type) and issubclass(kind, MoELayer)


def _submodules_of(spec: Any) -> Any:
    """Return the submodules of a spec. Changes to them change what the spec builds."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def _of_module(spec: Any, module: type, **options: Any) -> Any:
    """Return a spec that builds the class `module` with the arguments of `spec`, and with
    `options`."""
    if isinstance(spec, partial):
        return partial(module, *spec.args, **{**spec.keywords, **options})
    return dataclasses.replace(spec, module=module, params={**spec.params, **options})
