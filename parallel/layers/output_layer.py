"""The projection onto the vocabulary, moved out of the model so that the head can compute it in
chunks.

Megatron's model ends with all logits of a micro-batch. Here the model's last layer keeps the
weight (with its name, its place in checkpoints and the hooks of Megatron's DDP) but returns the
hidden states. The head (`parallel.logprobs`) computes the logits of a few rows at a
time.

Dimensions: n hidden states, c rows of a chunk, h hidden size, V_loc this tensor-parallel rank's
slice of the vocabulary.
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
    """Megatron's output layer without its matrix product: it returns its input, and the head
    computes the product."""

    project: Callable[[Tensor, Tensor], Tensor]
    """Computes logits [c, V_loc] from rows [c, h] and the weight [V_loc, h]."""
    chunk_rows: int
    """The number of rows whose logits are in memory at a time."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        return input_, None


def deferred_output_layer(
    config: TransformerConfig, present: ColumnParallelLinear, chunk_rows: int
) -> DeferredOutputLayer:
    """Make the layer that replaces the output layer `present` and has the same weight.

    A tied layer has no weight on a rank that holds the embedding; `Projection.of` then uses the
    embedding's weight.
    """
    layer = replaced(DeferredOutputLayer, config, present)
    layer.project = invariant.linear if isinstance(present, InvariantColumnLinear) else F.linear
    layer.chunk_rows = chunk_rows
    return layer


@dataclass(frozen=True)
class Projection:
    """The deferred output layer of a chunk, in the form that the head uses."""

    layer: DeferredOutputLayer
    weight: Tensor
    """[V_loc, h]: the layer's own weight, or the embedding's weight if the two are tied."""
    overlaps: bool
    """Whether hooks of Megatron's DDP reduce gradients during the backward pass. If so, the backward
    pass must return a gradient for the weight, because the hooks do not accept None."""

    @staticmethod
    def of(model: GPTModel, overlaps: bool) -> Projection | None:
        """Return the projection of `model`; None if the model does not end with a deferred
        layer."""
        if not model.post_process or not isinstance(model.output_layer, DeferredOutputLayer):
            return None
        shared = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
        assert weight is not None
        return Projection(model.output_layer, weight, overlaps)

    def gathered(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [n, h] of all rows. Under sequence parallelism they are gathered
        from all tensor-parallel ranks; otherwise `hidden` has them already.

        The backward pass sums the gradients of the ranks, as Megatron's own layer does.
        """
        layer = self.layer
        if layer.sequence_parallel:
            return gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=layer.tp_group
            )
        return copy_to_tensor_model_parallel_region(hidden, group=layer.tp_group)

    def chunked(self, temperature: float) -> Chunked:
        """Return the settings with which `mrl.kernels.linear_logprob` computes the logits."""
        layer = self.layer
        gradient: Callable[[Tensor], WeightGradient] = SummedGradient
        if getattr(self.weight, "main_grad", None) is not None:
            fused = layer.gradient_accumulation_fusion
            gradient = partial(MainGradient, fused=fused, overlaps=self.overlaps)
        group: Any = layer.tp_group  # Megatron's annotation allows for an int
        return Chunked(layer.chunk_rows, temperature, group, layer.project, gradient)


class MainGradient:
    """Adds the weight gradient of each chunk of rows directly to the weight's slice of the gradient
    buffer of Megatron's DDP.

    This follows the protocol of Megatron's fused accumulation (tensor_parallel/layers.py,
    `LinearWithGradAccumulationAndAsyncCommunication.backward`): `grad_added_to_main_grad` tells DDP's
    hook not to add the weight's `.grad` again. If the hooks reduce gradients during the backward pass,
    the weight's hook still needs some `.grad`: an uninitialized tensor or, with a tied embedding
    (`zero_out_wgrad`), a tensor of zeros. The embedding adds its own gradient to these zeros, and the
    hook adds the result to the buffer.
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
