"""Layers for `rollout.true_on_policy` on CPUs, which compute each token as the engine does.

They are Megatron's own classes, with the matrix products, attention and activation of
mrl.kernels.invariant in place of torch's. The rest of Megatron's forward pass (norms, rotary
embedding, softmax of the router, sums over the experts) already gives each token the same bits
whatever else is in the batch. mrl's plugin in the engine computes that rest in the same way.

Dimensions: n packed tokens of this rank, h heads, g query groups, d and e head sizes of keys and
values, K and N inputs and outputs of a linear layer on this rank.
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
from parallel.layers.attention import PackedAttention, PackedSequences

Layer = TypeVar("Layer", bound=ColumnParallelLinear)


class InvariantColumnLinear(ColumnParallelLinear):
    """A column-parallel layer that computes its product [..., K] -> [..., N] one row at a time."""

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
    ) -> Tensor:
        if bias is not None:
            raise ValueError("InvariantColumnLinear has no bias")
        return invariant.linear(input, weight)


class InvariantRowLinear(RowParallelLinear):
    """A row-parallel layer that computes its product [..., K] -> [..., N] one row at a time."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        return invariant.linear(input, weight)


class InvariantRouter(TopKRouter):
    """A top-k router that computes its logits one row at a time."""

    def gating(self, input: Tensor) -> Tensor:
        return invariant.linear(input, self.weight)


class InvariantAttention(PackedAttention):
    """PackedAttention whose forward pass computes each query by itself, over the query's keys in
    order.

    The gradients are those of PackedAttention.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Attend with query [n, h, d], key [n, g, d] and value [n, g, e]. Return [n, h, e]."""
        context, positions = packed.context, packed.positions
        assert context is not None
        assert positions is not None
        starts = torch.tensor([block.sequence_start for block in context.blocks], dtype=torch.int32)
        lengths = torch.tensor([block.num_tokens for block in context.blocks])
        first, count = starts.repeat_interleave(lengths), positions.int() + 1
        scale = query.shape[2] ** -0.5 if self.softmax_scale is None else self.softmax_scale

        def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if context.places is not None:  # sequences share rows: one key for each packed token
                key, value = key[context.places], value[context.places]
            return invariant.attention(query, key, value, first, count, scale)

        def differentiable(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return PackedAttention.attend(self, query, key, value, packed)

        return invariant.with_gradient_of(differentiable, kernel, query, key, value)


def output_layer(config: TransformerConfig, present: ColumnParallelLinear) -> torch.nn.Module:
    """Make the layer that replaces `present`, the projection onto the vocabulary, and has the same
    weight.

    A tied projection has no weight on a rank that holds the embedding; it then gets the embedding's
    weight at each call.
    """
    return replaced(InvariantColumnLinear, config, present)


def replaced(kind: type[Layer], config: TransformerConfig, present: ColumnParallelLinear) -> Layer:
    """Make a layer of the class `kind` with the sizes and the weight of the layer `present`."""
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
    """Return Megatron's settings for `rollout.true_on_policy`.

    On GPUs this also turns on Megatron's batch-invariant kernels in this process. These kernels
    have never been run with mrl.
    """
    if device.type == "cpu":
        return {"activation_func": invariant.silu}
    # This needs Triton, and thus a GPU. It replaces torch's products and sums in this process.
    kernels = importlib.import_module(
        "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    )
    kernels.enable_batch_invariant_mode()
    return {"batch_invariant_mode": True, "attention_backend": AttnBackend.flash}
