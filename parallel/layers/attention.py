"""Packed attention without TransformerEngine, causal within each sequence of a thd batch.

It is a drop-in `core_attention` for Megatron's layer spec, on CPUs and GPUs. The sequences of a
micro-batch are sorted into buckets of lengths that differ by less than 2x, and each bucket is one call
of `scaled_dot_product_attention`: few large calls, and less than 2x padding. Padding on the right needs
no mask, because causal queries do not attend to later keys. On GPUs torch's FlashAttention for packed
sequences is used instead where possible.

Under context parallelism, keys and values are gathered over the ranks. A rank has the queries of
two blocks of each sequence (`parallel.context`); a mask says which keys come before them. The rows
after a shared prefix form such blocks, too.

Dimensions: N packed tokens, n rows of this rank (`parallel.context`), b blocks of a bucket, s length of
its longest block, k keys of the block with most keys, h heads, g query groups, d and e head sizes of
keys and values (equal except in latent attention).
"""

from __future__ import annotations

import importlib
import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from parallel.context import Block, ContextSlice
from parallel.layers.buckets import Bucket, Layout, bucket_of, lay_out
from parallel.layers.rotary import Rotation, yarn_scale


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's `PackedSeqParams`, and values that the layers share in one micro-batch."""

    buckets: list[Bucket] = field(default_factory=list)
    layout: Layout | None = None
    context: ContextSlice | None = None
    positions: Tensor | None = None
    """i64[n]: the position of each of this rank's tokens in its sequence."""
    rotation: Rotation | None = None
    """Rotation of queries and keys in PackedAttention; the first layer's RotaryAttention sets it."""
    latent_rotation: Rotation | None = None
    """Rotation of queries' and keys' rotary parts in latent attention; the first layer sets it."""
    chosen_keys: dict[int, Tensor] = field(default_factory=dict)
    """i32[n, K]: the keys that a layer's queries see in sparse attention, by layer number, while the
    layer computes (`parallel.layers.indexer`)."""


def packed_sequences(
    cu_seqlens: Tensor, context: ContextSlice, device: torch.device
) -> PackedSequences:
    """Return a micro-batch's `PackedSequences`, on `device`; `cu_seqlens` i32[B+1] is on the CPU."""
    by_size: dict[tuple[int, bool, int], list[Block]] = {}
    for b in context.blocks:
        kind = (b.num_tokens - 1).bit_length(), b.offset > 0, b.offset // b.num_tokens
        by_size.setdefault(kind, []).append(b)
    longest = int(cu_seqlens.diff().max())
    bounds = cu_seqlens.to(device)
    ordered = [by_size[key] for key in sorted(by_size)]
    positions = [torch.arange(b.offset, b.offset + b.num_tokens) for b in context.blocks]
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cp_group=context.group,
        buckets=[bucket_of(blocks, context.places, device) for blocks in ordered],
        layout=lay_out(ordered, device),
        context=context,
        positions=torch.cat(positions).to(device),
    )


class RotaryAttention(SelfAttention):
    """Megatron's self-attention, except that PackedAttention rotates the queries and keys."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the layer. `rotary_pos_emb` f32[S, 1, 1, d]: the angles of positions 0 to S-1."""
        packed = packed_seq_params
        if packed is None or packed.positions is None:
            raise ValueError("RotaryAttention takes packed batches with positions, got none")
        if packed.rotation is None and rotary_pos_emb is not None:
            scale = yarn_scale(self.config)
            packed.rotation = Rotation.at(rotary_pos_emb, packed.positions, scale)
        return super().forward(
            hidden_states, attention_mask, *args, packed_seq_params=packed, **kwargs
        )


class PackedAttention(torch.nn.Module):
    """The `core_attention` of a Megatron layer.

    It maps query [n, h, d], key [n, g, d] and value [n, g, e] to [n, h*e]. Scores are scaled by
    `softmax_scale`, or else by 1 / sqrt(d).
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
        packed = packed_seq_params
        if packed is None or packed.context is None or query.dim() != 3:
            raise ValueError(
                f"{type(self).__name__} takes packed [n, h, d] batches, got query "
                f"{tuple(query.shape)}"
            )
        if packed.rotation is not None:
            query, key = packed.rotation.rotate(query), packed.rotation.rotate(key)
        return self.attend(query, key, value, packed).flatten(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Attend: rotated query [n, h, d] and key [n, g, d], value [n, g, e] -> [n, h, e]."""
        if takes_varlen(query, value, packed):
            return varlen_attention(query, key, value, packed, self.softmax_scale)
        return self._in_buckets(query, key, value, packed)

    def _in_buckets(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedSequences,
        buckets: list[Bucket] | None = None,
    ) -> Tensor:
        """Attend as `attend` does, in `buckets`, by default those of `packed`."""
        layout, context = packed.layout, packed.context
        assert layout is not None
        assert context is not None
        ready = layout.lay_out if context.places is None else context.gather_shared
        laid, key, value = layout.lay_out(query), ready(key), ready(value)
        outputs, start = [], 0
        for bucket in packed.buckets if buckets is None else buckets:
            rows = slice(start, start + math.prod(bucket.shape))

            def block(x: Tensor, rows: slice = rows, shape: tuple = bucket.shape) -> Tensor:
                return x[rows].unflatten(0, shape)

            found = (x[bucket.keys] if bucket.keys is not None else block(x) for x in (key, value))
            q, k, v = (x.transpose(1, 2) for x in (block(laid), *found))
            outputs.append(self.attend_bucket(q, k, v, bucket).transpose(1, 2).flatten(0, 1))
            start = rows.stop
        return layout.take_back(torch.cat(outputs) if len(outputs) > 1 else outputs[0])

    def attend_bucket(self, q: Tensor, k: Tensor, v: Tensor, bucket: Bucket) -> Tensor:
        """Attend in the blocks of a bucket: q [b, h, s, d], k [b, g, k, d], v [b, g, k, e] -> [b, h,
        s, e]."""
        return attend_blocks(q, k, v, bucket.mask, self.softmax_scale)


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Attend: q [b, h, s, d], k [b, g, k, d], v [b, g, k, e] -> [b, h, s, e]. `mask` bool[..., s, k] is
    true where a query sees a key; None for causal attention."""
    if q.shape[1] != k.shape[1] and not takes_grouped_heads(q, mask):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def takes_grouped_heads(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether `scaled_dot_product_attention` should get fewer key heads than query heads.

    On GPUs only FlashAttention and the math kernel support that (documentation of torch 2.13). The math
    kernel holds all scores [b, h, s, k], so FlashAttention must apply: no mask, not fp32.
    """
    return not query.is_cuda or (mask is None and query.dtype != torch.float32)


VARLEN_MAX_HEAD_SIZE = 256
"""FlashAttention's largest head size (`mha_varlen_fwd` in torch's native/transformers/cuda)."""


def takes_varlen(query: Tensor, value: Tensor, packed: PackedSequences) -> bool:
    """Return whether torch's FlashAttention for packed sequences supports these tensors.

    It needs half precision on a GPU, no context parallelism, and the same head size for keys and
    values: a multiple of 8, at most VARLEN_MAX_HEAD_SIZE.
    """
    context, size = packed.context, query.shape[2]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and context is not None
        and context.places is None
        and size == value.shape[2]
        and size % 8 == 0
        and size <= VARLEN_MAX_HEAD_SIZE
        and VARLEN is not None
    )


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None
) -> Tensor:
    """Attend in all sequences at once: query [n, h, d], key and value [n, g, d] -> [n, h, d].

    Nothing is padded. Like every FlashAttention, it sums the gradient of the queries in varying
    order unless `torch.use_deterministic_algorithms` is on.
    """
    assert VARLEN is not None
    bounds, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    return VARLEN(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),  # all keys up to the query's own position
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _find_varlen() -> Any:
    """Return torch's `varlen_attn` if it takes the arguments that are used here, as in torch 2.13.

    Otherwise return None; attention then always uses buckets.
    """
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return None
    wanted = {"scale", "window_size", "enable_gqa"}
    return function if wanted <= set(inspect.signature(function).parameters) else None


VARLEN = _find_varlen()
