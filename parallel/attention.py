"""Packed attention without TransformerEngine: causal within each sequence of a thd batch.

A drop-in `core_attention` for Megatron's layer spec, for CPUs and GPUs. The sequences of a
micro-batch are sorted into buckets whose lengths differ by less than 2x, and each bucket is one call
of `scaled_dot_product_attention`: a few large calls in place of one a sequence, and at most 2x
padding. Right padding needs no mask, because causal queries never look at later keys.

Dimensions: N packed tokens, b sequences of a bucket, s its longest length, h heads, g query groups,
d head size of queries and keys, e of values (the same but in latent attention).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class Bucket:
    """Where the sequences of one bucket lie in the packed tokens."""

    gather: Tensor
    """i64[b, s]: packed index of each position; padding repeats the sequence's last token."""
    positions: Tensor
    """i64[m]: indices into the flattened [b, s] that are real tokens."""
    packed: Tensor
    """i64[m]: the packed index of each of them."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's thd parameters plus the buckets, computed once per micro-batch."""

    buckets: list[Bucket] = field(default_factory=list)


def packed_sequences(cu_seqlens: Tensor, cp_group: Any) -> PackedSequences:
    """`cu_seqlens` i32[B+1] on any device -> parameters for one micro-batch, on that device."""
    bounds = cu_seqlens.tolist()
    spans = [(a, b) for a, b in pairwise(bounds) if b > a]
    by_size: dict[int, list[tuple[int, int]]] = {}
    for a, b in spans:
        by_size.setdefault((b - a - 1).bit_length(), []).append((a, b))
    longest = max(b - a for a, b in spans)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cp_group=cp_group,
        buckets=[_bucket(by_size[k], cu_seqlens.device) for k in sorted(by_size)],
    )


def _bucket(spans: list[tuple[int, int]], device: torch.device) -> Bucket:
    start = torch.tensor([a for a, _ in spans]).unsqueeze(1)
    length = torch.tensor([b - a for a, b in spans]).unsqueeze(1)
    step = torch.arange(int(length.max())).unsqueeze(0)
    gather = start + torch.minimum(step, length - 1)
    positions = (step < length).flatten().nonzero().squeeze(1)
    packed = gather.flatten()[positions]
    return Bucket(gather.to(device), positions.to(device), packed.to(device))


class PackedAttention(torch.nn.Module):
    """`core_attention` of a Megatron layer.

    Query [N, h, d], key [N, g, d], value [N, g, e] -> [N, h*e]; `softmax_scale` or 1 / sqrt(d).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if attention_dropout or config.attention_dropout:
            raise ValueError("PackedAttention has no dropout: set attention_dropout to 0")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if packed_seq_params is None or query.dim() != 3:
            raise ValueError(
                f"PackedAttention takes packed [N, h, d] batches, got query {tuple(query.shape)}"
            )
        out = query.new_empty(*query.shape[:2], value.shape[2])
        for bucket in packed_seq_params.buckets:
            q, k, v = (x[bucket.gather].transpose(1, 2) for x in (query, key, value))
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            rows = attended.transpose(1, 2).flatten(0, 1)[bucket.positions]
            out = out.index_copy(0, bucket.packed, rows)
        return out.flatten(1)
