"""Layers of `rollout.true_on_policy` on CPUs: the trainer's half of what the engine computes too.

Megatron's own classes, with the products, the attention and the activation of mrl.kernels.invariant in
the place of torch's; they enter through the layer spec and the config. Everything else of Megatron's
forward (norms, rotary embedding, softmax of the router, sums over the experts) already gives each token
the same bits whatever stands beside it, and the engine's plugin follows it.

Dimensions: n packed tokens of this rank, h heads, g query groups, d and e head sizes of keys
and values.
"""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.kernels import invariant
from parallel.layers import specs
from parallel.layers.attention import PackedAttention, PackedSequences

Layer = TypeVar("Layer", bound=ColumnParallelLinear)


class InvariantColumnLinear(ColumnParallelLinear):
    """Computes [..., K] -> [..., N] of one tensor-parallel rank, a row at a time."""

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
    ) -> Tensor:
        if bias is not None:
            raise ValueError("InvariantColumnLinear has no bias")
        return invariant.linear(input, weight)


class InvariantRowLinear(RowParallelLinear):
    """Computes [..., K] -> [..., N] of one tensor-parallel rank, a row at a time."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        return invariant.linear(input, weight)


class InvariantRouter(TopKRouter):
    """This top-k router computes its logits a row at a time."""

    def gating(self, input: Tensor) -> Tensor:
        return invariant.linear(input, self.weight)


class InvariantAttention(PackedAttention):
    """PackedAttention, each query by itself over its keys in order; gradients are PackedAttention's."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Attend with query [n, h, d], key [n, g, d] and value [n, g, e] -> [n, h, e]."""
        bounds = packed.cu_seqlens_q
        assert bounds is not None
        first = bounds[:-1].repeat_interleave(bounds.diff())
        count = torch.arange(1, len(query) + 1, dtype=torch.int32) - first
        scale = query.shape[2] ** -0.5 if self.softmax_scale is None else self.softmax_scale

        def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return invariant.attention(query, key, value, first, count, scale)

        def twin(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return PackedAttention.attend(self, query, key, value, packed)

        return invariant.with_gradient_of(twin, kernel, query, key, value)


def replace_layers(layer_submodules: Any) -> None:
    """Put the layers of this file into the spec of one decoder layer with local layers."""
    attention = layer_submodules.self_attention.submodules
    attention.linear_qkv = InvariantColumnLinear
    attention.core_attention = InvariantAttention
    attention.linear_proj = InvariantRowLinear
    feed_forward = specs.submodules_of(layer_submodules.mlp)
    if specs.has_experts(layer_submodules):
        feed_forward.router = InvariantRouter
        feed_forward = specs.submodules_of(feed_forward.experts)
    feed_forward.linear_fc1 = InvariantColumnLinear
    feed_forward.linear_fc2 = InvariantRowLinear


def output_layer(config: TransformerConfig, present: ColumnParallelLinear) -> torch.nn.Module:
    """Make what replaces the `present` projection to the vocabulary, with its weight.

    A tied one has none on a rank that holds the embedding: it is given that at each call.
    """
    return replaced(InvariantColumnLinear, config, present)


def replaced(kind: type[Layer], config: TransformerConfig, present: ColumnParallelLinear) -> Layer:
    """Make a layer of this kind with the sizes and the weight of the `present` one."""
    layer = kind(
        present.input_size,
        present.output_size,
        config=config,
        init_method=config.init_method,  # pyright: ignore[reportArgumentType]
        bias=False,
        gather_output=present.gather_output,
        skip_weight_param_allocation=True,
        tp_group=present.tp_group,  # pyright: ignore[reportArgumentType]
    )
    layer.weight = present.weight
    return layer


def settings(device: torch.device) -> dict[str, Any]:
    """Return settings of Megatron's config. GPUs use its batch-invariant kernels, which never
    ran here."""
    if device.type == "cpu":
        return {"activation_func": invariant.silu}
    # Triton, which there is on GPUs only. Replaces torch's products and sums of this process.
    kernels = importlib.import_module(
        "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    )
    kernels.enable_batch_invariant_mode()
    return {"batch_invariant_mode": True, "attention_backend": AttnBackend.flash}
