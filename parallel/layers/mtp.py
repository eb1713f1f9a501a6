"""The multi-token-prediction (MTP) layers of the last chunk of a model.

Layer k, from 0, combines what is known at row i (the model's hidden state after its last norm, or the
output of layer k - 1) with the embedding of token i + k + 1, and predicts token i + k + 2 (arXiv
2412.19437 section 2.2). The concatenation has the embedding first, as in the published code of
DeepSeek-V3, GLM-4.5 and Qwen3-Next.

Megatron's own block (`multi_token_prediction.py`) is not used: it is part of the model's forward pass,
lets its loss change the model's own weights, and holds one more embedding on the last pipeline stage.

Dimensions: n rows of this rank, h hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from parallel.implementation import Implementation
from parallel.layers.attention import PackedSequences
from parallel.layers.specs import SequenceParallelRMSNorm, mtp_layer_spec


class MtpLayer(MegatronModule):
    """One MTP layer. Each tensor-parallel rank holds all of `eh_proj` and computes its own rows."""

    def __init__(
        self, config: TransformerConfig, spec: Any, number: int, vp_stage: int | None
    ) -> None:
        """Build layer `number`, from 0. `spec` is that of its decoder layer."""
        super().__init__(config=config)
        size, device = config.hidden_size, torch.get_default_device()
        self.layer_number = config.num_layers + number + 1
        """Megatron's 1-based number of the layer, after those of the decoder."""
        eps = config.layernorm_epsilon
        self.enorm = SequenceParallelRMSNorm(config, size, eps)
        self.hnorm = SequenceParallelRMSNorm(config, size, eps)
        self.eh_proj = torch.nn.Linear(
            2 * size, size, bias=False, dtype=config.params_dtype, device=device
        )
        setattr(self.eh_proj.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        offset = get_transformer_layer_offset(config, vp_stage)  # the layer adds it again
        self.transformer_layer = build_module(
            spec, config=config, layer_number=self.layer_number - offset, vp_stage=vp_stage
        )
        self.final_layernorm = SequenceParallelRMSNorm(config, size, eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, packed: PackedSequences, rotary: Tensor | None
    ) -> Tensor:
        """Map embeddings and hidden states, both [n, 1, h], to the input [n, 1, h] of the output
        layer.

        `rotary` has the angles of RoPE, as the model's own layers get them; None if they need none.
        """

        def compute(embedded: Tensor, hidden: Tensor) -> Tensor:
            both = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
            states, _ = self.transformer_layer(
                hidden_states=self.eh_proj(both),
                attention_mask=None,
                rotary_pos_emb=rotary,
                packed_seq_params=packed,
            )
            return self.final_layernorm(states)

        if self.config.recompute_granularity != "full" or not torch.is_grad_enabled():
            return compute(embedded, hidden)
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        return checkpoint(compute, False, embedded, hidden)


class MtpBlock(MegatronModule):
    """The MTP layers of a model."""

    def __init__(
        self,
        config: TransformerConfig,
        implementation: Implementation,
        num_layers: int,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config=config)
        spec = mtp_layer_spec(config, implementation, vp_stage)
        self.layers = torch.nn.ModuleList(
            MtpLayer(config, spec, number, vp_stage) for number in range(num_layers)
        )
        for parameter in self.parameters():
            # Megatron leaves out such parameters when it computes the norm of the gradient, so that
            # these layers have no influence on how much the model's own gradients are clipped.
            setattr(parameter, "shared", True)  # noqa: B010
