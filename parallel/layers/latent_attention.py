"""Multi-head latent attention (MLA, arXiv 2405.04434) without TransformerEngine.

Megatron's local layer spec splits the two down projections over tensor-parallel ranks and gathers
their outputs. It gathers the rotary part of the keys, which every head uses, with an operation
whose backward pass does not sum the ranks' gradients, so the gradient of `kv_a_proj_with_mqa` is
wrong. With TransformerEngine every rank holds the whole projections, and sequence parallelism sums
the gradients. This module does the same with plain torch, so both implementations have the same
rules for their weights.

In sparse attention (DeepSeek-V3.2) an indexer chooses the keys that a query sees, for all heads alike.
Scores of the other keys are masked, so the products cost as much as without it: there is no kernel yet
that computes the chosen keys only.

Queries and keys are rotated in fp32, for all sequences of a packed batch at once
(`parallel.layers.rotary`).

Dimensions: n tokens of this rank (n / TP before the up projections), h heads of this rank, c size
of the query latent, r size of the key-value latent, d and p sizes of the plain and the rotary part
of a head, e size of a head's value, H hidden size.
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

from parallel.layers.attention import PackedAttention, PackedSequences
from parallel.layers.indexer import Indexer, with_chosen_keys
from parallel.layers.rotary import Rotation


class ReplicatedLinear(torch.nn.Module):
    """A linear layer without bias. Every tensor-parallel rank holds its whole weight.

    Given [..., inputs], it returns [..., outputs], and None in place of a bias.
    """

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        weight = torch.empty(
            outputs, inputs, dtype=config.params_dtype, device=torch.get_default_device()
        )
        self.weight = torch.nn.Parameter(weight)
        # Each rank has its part of the sequence, so Megatron sums the gradients over the ranks.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class SparseAttention(PackedAttention):
    """PackedAttention in which a query sees only the keys that the layer's indexer chose."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.layer_number = layer_number

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Attend: query [n, h, d + p], key [n, h, d + p], value [n, h, e] -> [n, h, e]."""
        chosen = packed.chosen_keys.get(self.layer_number)
        if chosen is None:  # every query sees all keys up to its own
            return super().attend(query, key, value, packed)
        return self._in_buckets(query, key, value, packed, with_chosen_keys(packed, chosen))


class LatentAttention(MLASelfAttention):
    """Megatron's MLA with down projections that every rank holds completely. With TP > 1 it needs
    sequence parallelism."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        hidden, rope = config.hidden_size, config.qk_pos_emb_head_dim
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(hidden, config.q_lora_rank, config)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, config.kv_lora_rank + rope, config)
        is_sparse = config.dsa_indexer_topk is not None
        self.indexer = Indexer(config, self.tp_group) if is_sparse else None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, packed_seq_params: PackedSequences | None = None, **kwargs: Any
    ) -> Any:
        """Compute the layer. The choice of keys is kept only where core attention is recomputed."""
        output = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        recomputes = self.checkpoint_core_attention and torch.is_grad_enabled()
        if packed_seq_params is not None and not recomputes:
            packed_seq_params.chosen_keys.pop(self.layer_number, None)
        return output

    def get_query_key_value_tensors(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **inference: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Project hidden_states [n / TP, 1, H].

        Return queries and keys [n, h, d + p], values [n, h, e], the query latents [n / TP, c] and
        the key-value latents [n / TP, r]. Raises ValueError for a batch that is not packed.
        """
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
        if self.indexer is not None:
            chosen = self.indexer(hidden, latent_q, packed, rotation)
            if chosen is not None:
                packed.chosen_keys[self.layer_number] = chosen

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
        """Project query latents [n / TP, c], key-value latents [n / TP, r] and rotary keys [n, p]
        to the queries, keys and values of this rank's heads."""
        config, heads = self.config, self.num_attention_heads_per_partition
        plain, rotary = config.qk_head_dim, config.qk_pos_emb_head_dim
        to_query = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = to_query(latent_q)[0].unflatten(-1, (heads, plain + rotary))
        both = self.linear_kv_up_proj(latent_kv)[0].unflatten(
            -1, (heads, plain + config.v_head_dim)
        )
        plain_q, rotary_q = query.split([plain, rotary], dim=-1)
        plain_k, value = both.split([plain, config.v_head_dim], dim=-1)
        rotary_q = rotation.rotate(rotary_q, interleaved=True)
        rotary_k = rotation.rotate(rotary_key.unsqueeze(1), interleaved=True)
        key = torch.cat([plain_k, rotary_k.expand(-1, heads, -1)], dim=-1)
        return torch.cat([plain_q, rotary_q], dim=-1), key, value.contiguous()

    def _rotation(self, packed: PackedSequences) -> Rotation:
        """Return the rotation of the packed tokens. The first layer computes it for all layers,
        because all layers have the same angles."""
        if packed.latent_rotation is None:
            assert packed.positions is not None
            found = self.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True)
            angles, scale = found if isinstance(found, tuple) else (found, 1.0)
            packed.latent_rotation = Rotation.at(angles, packed.positions, scale)
        return packed.latent_rotation

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the projections and norms of the spec. This overrides a method of megatron-core
        0.19 that would choose other norms."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {name: getattr(submodules, name) for name in (*names, "q_layernorm", "kv_layernorm")}
