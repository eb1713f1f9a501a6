"""Multi-head latent attention (MLA, arXiv 2405.04434) without TransformerEngine.

Megatron's local layer spec splits the two down projections over tensor-parallel ranks and gathers
their outputs. The rotary part of the keys, which every head uses, is gathered with an operation whose
backward does not add up the ranks' gradients: the gradient of `kv_a_proj_with_mqa` comes out wrong.
With TransformerEngine the projections are whole on every rank and sequence parallelism adds the
gradients up. This module does the same with plain torch, so the two implementations also share one
table of weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from mrl.errors import InputError


class ReplicatedLinear(torch.nn.Module):
    """x [..., inputs] -> (x W^T [..., outputs], None), W whole on every tensor-parallel rank."""

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        weight = torch.empty(
            outputs, inputs, dtype=config.params_dtype, device=torch.get_default_device()
        )
        self.weight = torch.nn.Parameter(weight)
        # Each rank sees its part of the sequence: Megatron sums the gradients over the ranks.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron's MLA with whole down projections; needs sequence parallelism when TP > 1.

    Raises InputError on a GPU with a megatron-core that has MLA only with TransformerEngine (0.16).
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        if multi_latent_attention.HAVE_TE and not isinstance(multi_latent_attention.TELinear, type):
            raise InputError(
                "model.transformer_impl: this megatron-core has no latent attention (MLA) without "
                "transformer-engine; install it, or megatron-core 0.19 or newer"
            )
        super().__init__(config, *args, **kwargs)
        hidden, rope = config.hidden_size, config.qk_pos_emb_head_dim
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(hidden, config.q_lora_rank, config)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, config.kv_lora_rank + rope, config)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Of megatron-core 0.19: build the norms of the layer spec, and none without a q latent."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {name: getattr(submodules, name) for name in (*names, "q_layernorm", "kv_layernorm")}
