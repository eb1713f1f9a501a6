"""RMSNorm of queries or keys over the whole projection, all heads together, as in OLMoE (arXiv
2409.02060, section 4.2.5).

Megatron's norms of queries and keys have one weight per element of a head and normalise each head by
itself. Here the mean square is over all heads of the model. Tensor-parallel ranks have a part of the
heads each, so they sum their sums of squares. Every rank holds the whole weight and uses the elements
of its own heads; Megatron sums the gradients of `q_layernorm` and `k_layernorm` over the ranks.

Dimensions: n tokens, h heads of this rank, H heads of the model, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ProjectionRMSNorm(torch.nn.Module):
    """An RMSNorm over all heads of a projection: [n, 1, h, d] -> [n, 1, h, d]."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        num_heads: int,
        **kwargs: Any,
    ) -> None:
        """Make the norm of `num_heads` heads, of the whole model, of `hidden_size` elements each."""
        super().__init__()
        self.eps = eps
        self.width = num_heads * hidden_size
        self.weight = torch.nn.Parameter(
            torch.ones(self.width, dtype=config.params_dtype, device=torch.get_default_device())
        )
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in fp32, and round once at the end, as the engine does."""
        size, rank = _tensor_parallel()
        heads, head_size = x.shape[-2:]
        if heads * head_size * size != self.width:
            raise ValueError(
                f"ProjectionRMSNorm of {self.width} elements on {size} ranks: got {heads} heads of "
                f"{head_size}"
            )
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        if size > 1:  # a rank's squares are in the mean of every rank, forward and backward
            squares = copy_to_tensor_model_parallel_region(
                reduce_from_tensor_model_parallel_region(squares)
            )
        own = self.weight.unflatten(0, (size, heads, head_size))[rank]
        normalised = wide * torch.rsqrt(squares / self.width + self.eps)
        return (normalised * own.float()).to(x.dtype)


def _tensor_parallel() -> tuple[int, int]:
    """Return (number of tensor-parallel ranks, this rank's index)."""
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


def normalise_projections(attention: Any, config: TransformerConfig) -> None:
    """Put the norms of queries and keys over whole projections into `attention`, the submodules of a
    self-attention's spec. Works for Megatron's local layers and for TransformerEngine's."""
    groups = config.num_query_groups or config.num_attention_heads
    for name, heads in (("q_layernorm", config.num_attention_heads), ("k_layernorm", groups)):
        setattr(attention, name, ModuleSpec(ProjectionRMSNorm, params={"num_heads": heads}))
