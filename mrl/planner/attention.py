"""The sizes of attention other than grouped-query attention, and what linear attention costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHUNK = 64
"""Tokens of a chunk of the delta rule (`parallel.layers.delta_rule`)."""


@dataclass(frozen=True)
class LatentAttention:
    """The sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int
    """Rank of the compressed queries; 0 if queries are projected directly from the hidden state."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rotary_positions: int = 0
    """Number of positions in the tables of cosines and sines that YaRN keeps in every layer; 0 without
    YaRN."""


@dataclass(frozen=True)
class Indexer:
    """The sizes of the indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1),
    which every layer has. It is not trained."""

    hidden: int
    q_rank: int
    heads: int
    head_dim: int
    topk: int
    """Number of keys that a query sees."""

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Numbers of elements of the projections onto queries, keys and head weights."""
        width = self.heads * self.head_dim
        return width * self.q_rank, self.head_dim * self.hidden, self.heads * self.hidden

    @property
    def norm(self) -> tuple[int, int]:
        """Numbers of elements of weight and bias of the keys' LayerNorm, which are always fp32."""
        return self.head_dim, self.head_dim

    @property
    def cached_bytes(self) -> int:
        """Bytes of a token's key in SGLang's cache: fp8, with an fp32 scale for each 128 elements
        (`mem_cache/index_key_cache.py`)."""
        return self.head_dim + self.head_dim // 128 * 4

    def key_flops(self, context: float) -> float:
        """FLOPs of one token to score the keys before it; 0 if it sees all of its `context` keys."""
        return 2 * context * self.heads * (self.head_dim + 1) if context > self.topk else 0.0


@dataclass(frozen=True)
class LinearAttention:
    """The sizes of the layers that are gated delta nets (arXiv 2412.06464)."""

    layers: tuple[int, ...]
    """0-based indices of these layers."""
    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def keys(self) -> int:
        """Number of elements of a token's keys, over all heads. Its queries have as many."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of elements of a token's values, over all heads. Its output gates have as many."""
        return self.value_heads * self.value_dim

    @property
    def matrices(self) -> tuple[int, int]:
        """Numbers of elements of the projections that are sharded: onto queries, keys, values and
        gates, and of the outputs."""
        return 2 * self.hidden * (self.keys + self.values), self.hidden * self.values

    @property
    def write_and_decay(self) -> int:
        """Number of elements of the projection onto two numbers for each value head."""
        return 2 * self.hidden * self.value_heads

    @property
    def small(self) -> tuple[int, ...]:
        """Numbers of elements of the parameters that are no projections: convolution, two numbers for
        each value head, and the norm of a head."""
        channels = 2 * self.keys + self.values
        return channels * self.conv_width, self.value_heads, self.value_heads, self.value_dim

    @property
    def rule_flops(self) -> int:
        """FLOPs of the delta rule for one token, forward: three products with the state, and the
        products and the triangular system within a chunk."""
        d, e = self.key_dim, self.value_dim
        return self.value_heads * (6 * d * e + CHUNK * (5 * d + 3 * e))

    @property
    def activations(self) -> tuple[int, int]:
        """Numbers of elements that a layer keeps for one token, in the weights' dtype and in fp32:
        projections and convolution, and the delta rule's tensors."""
        d, e = self.key_dim, self.value_dim
        channels = 2 * self.keys + self.values
        rule = 10 * d + 4 * e + 5 * CHUNK + 2 * d * e // CHUNK
        return 5 * channels + 3 * self.values, self.value_heads * rule


def read_latent(settings: Mapping[str, Any]) -> LatentAttention | None:
    """Return the latent attention of Megatron's settings; None without it."""
    if not settings.get("multi_latent_attention"):
        return None
    return LatentAttention(
        q_rank=settings["q_lora_rank"] or 0,
        kv_rank=settings["kv_lora_rank"],
        nope_dim=settings["qk_head_dim"],
        rope_dim=settings["qk_pos_emb_head_dim"],
        value_dim=settings["v_head_dim"],
        rotary_positions=settings.get("original_max_position_embeddings", 0),
    )


def read_indexer(settings: Mapping[str, Any]) -> Indexer | None:
    """Return the indexer of Megatron's settings; None without one."""
    if settings.get("dsa_indexer_topk") is None:
        return None
    return Indexer(
        settings["hidden_size"],
        settings["q_lora_rank"],
        settings["dsa_indexer_n_heads"],
        settings["dsa_indexer_head_dim"],
        settings["dsa_indexer_topk"],
    )


def read_linear(settings: Mapping[str, Any]) -> LinearAttention | None:
    """Return the linear attention of Megatron's settings; None if every layer has full attention."""
    pattern = settings.get("linear_attention_freq")
    if not pattern:
        return None
    return LinearAttention(
        tuple(number for number, is_linear in enumerate(pattern) if is_linear),
        settings["hidden_size"],
        settings["linear_num_key_heads"],
        settings["linear_num_value_heads"],
        settings["linear_key_head_dim"],
        settings["linear_value_head_dim"],
        settings["linear_conv_kernel_dim"],
    )
