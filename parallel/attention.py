"""Packed attention without TransformerEngine: causal within each sequence of a thd batch.

A drop-in `core_attention` for Megatron's layer spec, for CPUs and GPUs. The sequences of a
micro-batch are sorted into buckets whose lengths differ by less than 2x, and each bucket is one call
of `scaled_dot_product_attention`: a few large calls in place of one a sequence, and at most 2x
padding. Right padding needs no mask, because causal queries never look at later keys.

Under context parallelism, keys and values are gathered over the ranks; the queries of a rank are two
blocks of each sequence (`parallel.context`), and a mask says which keys come before them.

Dimensions: N packed tokens, n of them on this rank (n = N without context parallelism), b blocks of a
bucket, s its longest block, k its most keys, h heads, g query groups, d and e head sizes of keys and
values (the same but in latent attention).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from parallel.context import Block, ContextSlice


@dataclass
class Bucket:
    """Where the blocks of one bucket lie among this rank's tokens, and their keys among all."""

    queries: Tensor
    """i64[b, s]: local index of each position; padding repeats the block's last token."""
    positions: Tensor
    """i64[m]: indices into the flattened [b, s] that are real tokens."""
    rows: Tensor
    """i64[m]: the local index of each of them."""
    keys: Tensor
    """i64[b, k]: index into the gathered keys; equal to `queries` for whole sequences."""
    mask: Tensor | None
    """bool[b, 1, s, k]: true where a query sees a key; None for plain causal blocks."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's thd parameters plus the buckets, computed once per micro-batch."""

    buckets: list[Bucket] = field(default_factory=list)
    context: ContextSlice | None = None


def packed_sequences(
    cu_seqlens: Tensor, context: ContextSlice, device: torch.device
) -> PackedSequences:
    """`cu_seqlens` i32[B+1] on the CPU -> parameters for one micro-batch on `device`."""
    by_size: dict[tuple[int, int], list[Block]] = {}
    for block in context.blocks:
        size = (block.num_tokens - 1).bit_length()
        by_size.setdefault((size, block.offset // block.num_tokens), []).append(block)
    longest = int(cu_seqlens.diff().max())
    bounds = cu_seqlens.to(device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cp_group=context.group,
        buckets=[_bucket(by_size[k], context.places, device) for k in sorted(by_size)],
        context=context,
    )


def _bucket(blocks: list[Block], places: Tensor | None, device: torch.device) -> Bucket:
    def column(values: list[int]) -> Tensor:
        return torch.tensor(values).unsqueeze(1)

    start = column([block.local_start for block in blocks])
    length = column([block.num_tokens for block in blocks])
    step = torch.arange(int(length.max())).unsqueeze(0)
    queries = start + torch.minimum(step, length - 1)
    positions = (step < length).flatten().nonzero().squeeze(1)
    rows = queries.flatten()[positions]
    offset = column([block.offset for block in blocks])
    key_step = torch.arange(int((offset + length).max())).unsqueeze(0)
    keys = column([b.sequence_start for b in blocks]) + key_step.minimum(offset + length - 1)
    mask = None
    if bool(offset.any()):
        mask = key_step.unsqueeze(1) <= (offset + step).unsqueeze(2)
        mask = mask.unsqueeze(1).to(device)
    keys = keys.to(device) if places is None else places[keys.to(device)]
    return Bucket(queries.to(device), positions.to(device), rows.to(device), keys, mask)


class PackedAttention(torch.nn.Module):
    """`core_attention` of a Megatron layer.

    Query [n, h, d], key [n, g, d], value [n, g, e] -> [n, h*e]; `softmax_scale` or 1 / sqrt(d).
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
        if packed_seq_params is None or packed_seq_params.context is None or query.dim() != 3:
            raise ValueError(
                f"PackedAttention takes packed [n, h, d] batches, got query {tuple(query.shape)}"
            )
        key, value = (packed_seq_params.context.gather_shared(x) for x in (key, value))
        out = query.new_empty(*query.shape[:2], value.shape[2])
        for bucket in packed_seq_params.buckets:
            q = query[bucket.queries].transpose(1, 2)
            k, v = (x[bucket.keys].transpose(1, 2) for x in (key, value))
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            rows = attended.transpose(1, 2).flatten(0, 1)[bucket.positions]
            out = out.index_copy(0, bucket.rows, rows)
        return out.flatten(1)
