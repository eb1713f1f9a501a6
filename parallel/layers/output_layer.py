"""The projection onto the vocabulary is taken out of the model and given to the head in chunks.

Megatron's model ends with all logits of a micro-batch. Here its last layer keeps the weight, with its
name, its place in checkpoints and the hooks of Megatron's DDP, but hands the hidden states on; the head
(`parallel.logprobs`) computes the logits of some rows at a time.

n hidden states, h hidden size, V_loc this tensor-parallel rank's slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.kernels import Chunked, invariant
from mrl.kernels.linear_logprob import SummedGradient, WeightGradient, add_product
from parallel.layers.invariant import InvariantColumnLinear, replaced


class DeferredOutputLayer(ColumnParallelLinear):
    """Megatron's output layer without its product: what goes in comes out, and the head multiplies."""

    project: Callable[[Tensor, Tensor], Tensor]
    """Rows [c, h] and weight [V_loc, h] -> logits [c, V_loc]."""
    chunk_rows: int
    """Rows whose logits are held at a time."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        return input_, None


def deferred_output_layer(
    config: TransformerConfig, present: ColumnParallelLinear, chunk_rows: int
) -> DeferredOutputLayer:
    """Make what replaces the `present` output layer, with its weight.

    A tied one has none on a rank that holds the embedding: `Projection.of` finds it there.
    """
    layer = replaced(DeferredOutputLayer, config, present)
    layer.project = invariant.linear if isinstance(present, InvariantColumnLinear) else F.linear
    layer.chunk_rows = chunk_rows
    return layer


@dataclass(frozen=True)
class Projection:
    """A projection is a chunk's deferred output layer, as the head uses it."""

    layer: DeferredOutputLayer
    weight: Tensor
    """[V_loc, h]: its own, or the embedding's where they are tied."""
    overlaps: bool
    """Gradients are reduced during the backward, by hooks that want to see a gradient."""

    @staticmethod
    def of(model: GPTModel, overlaps: bool) -> Projection | None:
        """None where `model` does not end with a deferred layer."""
        if not model.post_process or not isinstance(model.output_layer, DeferredOutputLayer):
            return None
        shared = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
        assert weight is not None
        return Projection(model.output_layer, weight, overlaps)

    def gathered(self, hidden: Tensor) -> Tensor:
        """This rank's hidden states -> [n, h] of all tensor-parallel ranks, whose gradients are summed
        in the backward: as Megatron's own layer does."""
        layer = self.layer
        if layer.sequence_parallel:
            return gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=layer.tp_group
            )
        return copy_to_tensor_model_parallel_region(hidden, group=layer.tp_group)

    def chunked(self, temperature: float) -> Chunked:
        """How `mrl.kernels.linear_logprob` is to compute the logits."""
        layer = self.layer
        gradient: Callable[[Tensor], WeightGradient] = SummedGradient
        if getattr(self.weight, "main_grad", None) is not None:
            fused = layer.gradient_accumulation_fusion
            gradient = partial(MainGradient, fused=fused, overlaps=self.overlaps)
        group: Any = layer.tp_group  # Megatron's annotation allows for an int
        return Chunked(layer.chunk_rows, temperature, group, layer.project, gradient)


class MainGradient:
    """The weight's share of the gradient buffer of Megatron's DDP, to which chunks are added directly.

    By the protocol of Megatron's fused accumulation (tensor_parallel/layers.py,
    `LinearWithGradAccumulationAndAsyncCommunication.backward`): `grad_added_to_main_grad` tells the
    hook of DDP not to add the weight's `.grad` once more. Where reductions overlap, that hook still
    asks for a `.grad`: it gets an empty tensor, or zeros where a tied embedding adds its own share to
    it (`zero_out_wgrad`) and the hook adds both.
    """

    def __init__(self, weight: Any, *, fused: bool, overlaps: bool) -> None:
        self._weight, self._fused, self._overlaps = weight, fused, overlaps

    def add(self, grad_logits: Tensor, rows: Tensor) -> None:
        total = self._weight.main_grad
        if not self._fused:
            add_product(total, grad_logits, rows)
            return
        # apex's product that adds to its output in one kernel; has not run on a GPU.
        kernels: Any = megatron_layers.fused_weight_gradient_mlp_cuda  # pyright: ignore
        if total.dtype == torch.float32:
            kernels.wgrad_gemm_accum_fp32(rows, grad_logits, total)
        else:
            kernels.wgrad_gemm_accum_fp16(rows, grad_logits, total)

    def result(self) -> Tensor | None:
        weight = self._weight
        weight.grad_added_to_main_grad = True
        if not self._overlaps:
            return None
        if getattr(weight, "zero_out_wgrad", False):
            return torch.zeros_like(weight)
        return torch.empty_like(weight)
