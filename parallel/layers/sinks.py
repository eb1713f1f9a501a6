"""Packed attention with sinks and sliding windows, as in gpt-oss (arXiv 2508.10925).

A sink is a learned logit of a head in the denominator of each query's softmax. Here it is one more key
with the value 0, which every query sees. Queries and keys get SINK_COLUMNS more columns: the first is
the sink, divided by the softmax scale, in queries, and 1 in the sink's key and 0 in all other keys.
torch's fused attention computes that, and its backward pass gives the gradient of the sinks.

The sink's key is part of each block of a bucket, so every sample of a packed batch has its own, and
nothing changes for shared prefixes and context parallelism, where a query's keys are all on its rank.

A window of w lets a query see its own key and the w - 1 keys before it. Sequences that are longer than
two windows are cut into chunks of w queries, which attend to the keys of their own chunk and of the one
before. Under context parallelism and for what comes after a shared prefix, the window is only a mask.

Dimensions: as in `parallel.layers.attention`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from parallel.layers.attention import PackedAttention, PackedSequences, attend_blocks
from parallel.layers.buckets import Bucket

SINK_COLUMNS = 8
"""The columns that the sinks need, and more: fused kernels take multiples of 8 columns."""


class SinkAttention(PackedAttention):
    """PackedAttention with a sink for each head, and in some layers a window.

    The sinks have Megatron's name `softmax_offset`. They are split over tensor-parallel ranks like the
    heads.
    """

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        num_heads = config.num_attention_heads // config.tensor_model_parallel_size
        sinks = torch.zeros(num_heads, dtype=config.params_dtype, device=torch.get_default_device())
        self.softmax_offset = torch.nn.Parameter(sinks)
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        size, frequency = config.window_size, config.window_attn_skip_freq
        has_window = is_layer_window_attention(size, frequency, layer_number)
        self.window: int | None = size[0] + 1 if has_window else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Attend: rotated query [n, h, d] and key [n, g, d], value [n, g, d] -> [n, h, d]."""
        return self._in_buckets(query, key, value, packed)

    def attend_bucket(self, q: Tensor, k: Tensor, v: Tensor, bucket: Bucket) -> Tensor:
        """Attend in the blocks of a bucket: q [b, h, s, d], k and v [b, g, k, d] -> [b, h, s, d]."""
        window, (num_blocks, length) = self.window, bucket.shape
        if window is None or bucket.mask is not None or length <= 2 * window:
            return self._attend(q, k, v, window_mask(bucket, window, q.device))
        count = -(-length // window)

        def chunks(x: Tensor, before: int) -> Tensor:
            """Cut x [b, g, s, d] into chunks of a window, with as many tokens before it, or none."""
            x = F.pad(x, (0, 0, before * window, count * window - length))
            cut = x.unfold(2, (1 + before) * window, window)
            return cut.permute(0, 2, 1, 4, 3).flatten(0, 1)

        mask = chunk_mask(bucket, window, q.device)
        out = self._attend(chunks(q, 0), chunks(k, 1), chunks(v, 1), mask)
        return out.unflatten(0, (num_blocks, count)).transpose(1, 2).flatten(2, 3)[:, :, :length]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with the sinks, and with `mask` or else causally: q [b, h, s, d], k and v [b, g, k, d]
        -> [b, h, s, d]."""
        size = q.shape[-1]
        scale = size**-0.5 if self.softmax_scale is None else self.softmax_scale
        logits = (self.softmax_offset / scale).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
        q = torch.cat([q, F.pad(logits.to(q.dtype), (0, SINK_COLUMNS - 1))], dim=-1)
        k, v = (F.pad(x, (0, SINK_COLUMNS, 1, 0)) for x in (k, v))
        k[:, :, 0, size] = 1.0
        if mask is None:
            # A query of zeros for the sink's key keeps the mask causal.
            out = attend_blocks(F.pad(q, (0, 0, 1, 0)), k, v, None, scale)[:, :, 1:]
        else:
            out = attend_blocks(q, k, v, F.pad(mask, (1, 0), value=True), scale)
        return out[..., :size]


def window_mask(bucket: Bucket, window: int | None, device: torch.device) -> Tensor | None:
    """Return bool[b or 1, 1, s, k], true where a query of a bucket's blocks sees a key within
    `window`; None if plain causal attention suffices."""
    length = bucket.shape[1]
    if window is None or (bucket.mask is None and length <= window):
        return bucket.mask
    if window not in bucket.windows:
        mask = bucket.mask
        if mask is None:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
        # A query sees key j if it comes no later, and if key j + window comes later.
        before = F.pad(mask[..., window:], (0, min(window, mask.shape[-1])))
        bucket.windows[window] = mask & ~before
    return bucket.windows[window]


def chunk_mask(bucket: Bucket, window: int, device: torch.device) -> Tensor:
    """Return bool[b c, 1, w, 2 w], true where a query of a chunk sees a key: the queries of a block are
    cut into c chunks of the window w, and the keys are those of the chunk and of the one before."""
    if -window not in bucket.windows:
        num_blocks, length = bucket.shape
        query = torch.arange(window, device=device).unsqueeze(1)
        key = torch.arange(2 * window, device=device)
        seen = (key > query) & (key <= query + window)
        masks = seen.repeat(-(-length // window), 1, 1, 1)
        masks[0, :, :, :window] = False  # nothing comes before the first chunk
        bucket.windows[-window] = masks.repeat(num_blocks, 1, 1, 1)
    return bucket.windows[-window]
