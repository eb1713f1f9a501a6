"""Multi-head latent attention (MLA, arXiv 2405.04434) is built here without TransformerEngine.

Megatron's local layer spec splits the two down projections over tensor-parallel ranks and gathers
their outputs. The rotary part of the keys, which every head uses, is gathered with an operation whose
backward does not add up the ranks' gradients: the gradient of `kv_a_proj_with_mqa` comes out wrong.
With TransformerEngine the projections are whole on every rank and sequence parallelism adds the
gradients up. This module does the same with plain torch, so the two implementations also share one
table of weights.

Queries and keys are turned in fp32, all sequences of a packed batch at once (`parallel.layers.rotary`).

n tokens of this rank (n / TP before the up projections), h heads of this rank, c and r sizes of the
latents of queries and of keys and values, d and p plain and rotary part of a head, e size of a value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from parallel.layers.attention import PackedSequences
from parallel.layers.rotary import Rotation


class ReplicatedLinear(torch.nn.Module):
    """Computes (x W^T [..., outputs], None) of x [..., inputs], W whole on every tensor-parallel
    rank."""

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
    """This is Megatron's MLA with whole down projections; it needs sequence parallelism when TP > 1."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        hidden, rope = config.hidden_size, config.qk_pos_emb_head_dim
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(hidden, config.q_lora_rank, config)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, config.kv_lora_rank + rope, config)

    def get_query_key_value_tensors(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **inference: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Project hidden_states [n / TP, 1, H] to queries and keys [n, h, d + p], values [n, h, e], the
        latents of queries [n / TP, c] and of keys and values [n / TP, r]."""
        config, packed = self.config, packed_seq_params
        kv_norm: Any = self.kv_layernorm
        if packed is None or packed.positions is None:
            raise ValueError("LatentAttention takes packed batches with positions, got none")
        hidden = hidden_states.squeeze(1)
        latent_q = hidden
        if config.q_lora_rank is not None:
            latent_q = self.q_layernorm(self.linear_q_down_proj(hidden)[0])
        combined, _ = self.linear_kv_down_proj(hidden)
        latent_kv, rotary_key = combined.split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        if config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(
                rotary_key.contiguous(), group=self.tp_group
            )
        latent_kv = kv_norm(latent_kv)
        rotation = self._rotation(packed)

        def project(latent_q: Tensor, latent_kv: Tensor, rotary_key: Tensor) -> tuple[Tensor, ...]:
            return self._project(latent_q, latent_kv, rotary_key, rotation)

        if self.recompute_up_proj:
            self.qkv_up_checkpoint = CheckpointWithoutOutput()
            query, key, value = self.qkv_up_checkpoint.checkpoint(
                project, latent_q, latent_kv, rotary_key
            )
        else:
            query, key, value = project(latent_q, latent_kv, rotary_key)
        return query, key, value, latent_q, latent_kv

    def _project(
        self, latent_q: Tensor, latent_kv: Tensor, rotary_key: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[n / TP, c], [n / TP, r], [n, p] -> queries, keys and values of this rank's heads."""
        config, heads = self.config, self.num_attention_heads_per_partition
        plain, turned = config.qk_head_dim, config.qk_pos_emb_head_dim
        to_query = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = to_query(latent_q)[0].unflatten(-1, (heads, plain + turned))
        both = self.linear_kv_up_proj(latent_kv)[0].unflatten(
            -1, (heads, plain + config.v_head_dim)
        )
        plain_q, rotary_q = query.split([plain, turned], dim=-1)
        plain_k, value = both.split([plain, config.v_head_dim], dim=-1)
        rotary_q = rotation.turn(rotary_q, interleaved=True)
        rotary_k = rotation.turn(rotary_key.unsqueeze(1), interleaved=True)
        key = torch.cat([plain_k, rotary_k.expand(-1, heads, -1)], dim=-1)
        return torch.cat([plain_q, rotary_q], dim=-1), key, value.contiguous()

    def _rotation(self, packed: PackedSequences) -> Rotation:
        """Computed by the first layer that asks; the angles are the same in all of them."""
        if packed.latent_rotation is None:
            assert packed.positions is not None
            found = self.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True)
            angles, scale = found if isinstance(found, tuple) else (found, 1.0)
            packed.latent_rotation = Rotation.at(angles, packed.positions, scale)
        return packed.latent_rotation

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Replace a hook of megatron-core 0.19: build the spec's norms, and none without a q latent."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {name: getattr(submodules, name) for name in (*names, "q_layernorm", "kv_layernorm")}
