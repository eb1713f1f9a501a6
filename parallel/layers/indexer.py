"""The lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): it chooses the keys that a
query sees.

Query t scores key s as `sum_j w_tj ReLU(q_tj . k_s)` (eq. 1), over the heads j of the indexer, and
sees the K keys up to its own with the highest scores. Queries come from the latent of the attention's
queries, keys and head weights w from the hidden state. Keys have a LayerNorm with a bias. RoPE rotates
the first dimensions of queries and keys, whose pairs are i and i + r, where the attention itself has
the pairs 2i and 2i+1. The weights are scaled by `h ** -0.5 * d ** -0.5`.

The published inference code also multiplies queries and keys by a Hadamard matrix and rounds them to
fp8. The matrix is orthogonal, so it changes no score. Here there is neither, and scores are fp32.
Among equal scores the earlier keys win, so that the choice does not depend on the layout.

The indexer is frozen: its weights are buffers. A choice has no gradient, so no policy loss reaches
them.

Every tensor-parallel rank has the whole indexer and chooses for its own rows of the sequence; the
choices are then gathered, because a rank's heads attend for all rows. Keys are gathered over tensor-
and context-parallel ranks.

Dimensions: n rows of this context-parallel rank, m = n / TP rows of this rank, R rows of all
context-parallel ranks, h heads and d head size of the indexer, r rotated pairs, c size of the query
latent, H hidden size, K keys per query, k keys that a block's queries choose from.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from moe.keys import NO_KEYS, KeyReplay
from parallel.layers.attention import PackedSequences
from parallel.layers.buckets import Bucket
from parallel.layers.rotary import Rotation

NORM_EPS = 1e-6
"""The epsilon of the keys' LayerNorm, as in the published inference code."""
MAX_SCORES = 1 << 26
"""How many elements the scores [queries, h, k] may have at once, 256 MiB in fp32."""
FP32_BUFFERS = ("key_norm_weight", "key_norm_bias")
"""The buffers that stay fp32 in a model of another dtype. SGLang has them in fp32, too."""


class Indexer(torch.nn.Module):
    """The indexer of one decoder layer."""

    query_weight: Tensor
    key_weight: Tensor
    head_weight: Tensor
    key_norm_weight: Tensor
    key_norm_bias: Tensor

    def __init__(self, config: Any, tp_group: Any) -> None:
        super().__init__()
        self.config, self.tp_group = config, tp_group
        self.topk: int = config.dsa_indexer_topk
        self.num_heads: int = config.dsa_indexer_n_heads
        self.head_size: int = config.dsa_indexer_head_dim
        self.replay: KeyReplay | None = None
        width = self.num_heads * self.head_size
        for name, shape, dtype in (
            ("query_weight", (width, config.q_lora_rank), config.params_dtype),
            ("key_weight", (self.head_size, config.hidden_size), config.params_dtype),
            ("head_weight", (self.num_heads, config.hidden_size), config.params_dtype),
            ("key_norm_weight", (self.head_size,), torch.float32),
            ("key_norm_bias", (self.head_size,), torch.float32),
        ):
            zeros = torch.zeros(shape, dtype=dtype, device=torch.get_default_device())
            self.register_buffer(name, zeros)

    @torch.no_grad()
    def forward(
        self, hidden: Tensor, latent_q: Tensor, packed: PackedSequences, rotation: Rotation
    ) -> Tensor | None:
        """Choose keys for all rows: hidden [m, H], latents of the queries [m, c] -> i32[n, K].

        `rotation` is that of the n rows. A row has the positions of its keys in its sequence, in
        ascending order; NO_KEYS if it sees all keys up to its own, because they are at most K. The
        result is None if that is so for all rows of the micro-batch. Raises ValueError if a replayed
        choice does not have the shape [m, K].
        """
        target = None if self.replay is None else self.replay.next_target()
        longest = packed.max_seqlen_q
        assert longest is not None
        if longest <= self.topk:
            return None
        wanted = (len(hidden), self.topk)
        if target is not None and tuple(target.shape) != wanted:
            raise ValueError(
                f"keys of the indexer: this rank has {wanted} [rows, keys per query], the replayed "
                f"choice is {tuple(target.shape)}"
            )
        if target is None:
            own = self._choose(hidden, latent_q, packed, rotation)
        else:
            own = target.to(hidden.device, torch.int32)
        if self.replay is not None:
            self.replay.record(own, longest)
        return self._gather(own)

    def _choose(
        self, hidden: Tensor, latent_q: Tensor, packed: PackedSequences, rotation: Rotation
    ) -> Tensor:
        """Return the choice i32[m, K] for this rank's own rows."""
        context, (num_rows, topk) = packed.context, (len(hidden), self.topk)
        assert context is not None
        start = self.tp_group.rank() * num_rows if self.config.sequence_parallel else 0
        keys = self._keys(hidden, packed, rotation)
        chosen = torch.full((num_rows, topk), NO_KEYS, dtype=torch.int32, device=hidden.device)
        for block in context.blocks:
            # The first row of this rank that has more than K keys, and the end of its rows.
            first = max(block.local_start + max(topk - block.offset, 0), start)
            end = min(block.local_start + block.num_tokens, start + num_rows)
            if first >= end:
                continue
            own = slice(first - start, end - start)
            position = block.offset + first - block.local_start
            index = (
                torch.arange(position + end - first, device=hidden.device) + block.sequence_start
            )
            if context.places is not None:
                index = context.places[index]
            rotated = Rotation(rotation.cos[first:end], rotation.sin[first:end])
            chosen[own] = self._best(hidden[own], latent_q[own], keys[index], position, rotated)
        return chosen

    def _keys(self, hidden: Tensor, packed: PackedSequences, rotation: Rotation) -> Tensor:
        """Return the rotated keys f32[R, d] of hidden states [m, H]."""
        keys = F.linear(hidden, self.key_weight).float()
        keys = F.layer_norm(
            keys, (self.head_size,), self.key_norm_weight, self.key_norm_bias, NORM_EPS
        )
        keys = rotation.rotate(self._gather(keys.to(hidden.dtype)).unsqueeze(1)).squeeze(1)
        assert packed.context is not None
        return packed.context.gather_shared(keys).float()

    def _gather(self, own: Tensor) -> Tensor:
        """Gather [m, ...] over the tensor-parallel ranks -> [n, ...]."""
        if not self.config.sequence_parallel:
            return own
        return gather_from_sequence_parallel_region(own.contiguous(), group=self.tp_group)

    def _best(
        self, hidden: Tensor, latent_q: Tensor, keys: Tensor, position: int, rotation: Rotation
    ) -> Tensor:
        """Return the choice i32[q, K] of q consecutive queries of a sequence, the first of which is at
        `position`, from the keys f32[k, d] up to the last query's own."""
        query = F.linear(latent_q, self.query_weight).unflatten(-1, (self.num_heads, -1))
        query = rotation.rotate(query).float()
        scale = (self.num_heads * self.head_size) ** -0.5
        weight = F.linear(hidden.float(), self.head_weight.float()) * scale
        step = max(1, MAX_SCORES // (self.num_heads * len(keys)))
        places, found = torch.arange(len(keys), device=keys.device), []
        for start in range(0, len(query), step):
            each = slice(start, start + step)
            scores = F.relu(query[each] @ keys.T)
            scores = torch.einsum("qh,qhk->qk", weight[each], scores).nan_to_num(nan=0.0)
            own = position + start + torch.arange(len(scores), device=keys.device).unsqueeze(1)
            found.append(best_keys(scores.masked_fill(places > own, float("-inf")), self.topk))
        return torch.cat(found)


def best_keys(scores: Tensor, topk: int) -> Tensor:
    """Return the places i32[q, K] of the K = `topk` highest scores of each row of f32[q, k], in
    ascending order. Among equal scores the first win."""
    least = scores.topk(topk, dim=1).values[:, -1:]
    above, ties = scores > least, scores == least
    room = topk - above.sum(1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(1) <= room))
    return chosen.nonzero()[:, 1].view(-1, topk).int()


def with_chosen_keys(packed: PackedSequences, chosen: Tensor) -> list[Bucket]:
    """Return the buckets of a micro-batch with masks by which each row sees the keys in `chosen`
    i32[n, K] and no others. A row of NO_KEYS sees all keys up to its own."""
    assert packed.layout is not None
    laid, topk = chosen[packed.layout.source], chosen.shape[1]
    buckets, start = [], 0
    for bucket in packed.buckets:
        (num_blocks, length), first = bucket.shape, start
        start += num_blocks * length
        num_keys = length if bucket.keys is None else bucket.keys.shape[1]
        if num_keys <= topk:
            buckets.append(bucket)
            continue
        ids = laid[first:start].unflatten(0, bucket.shape).long()
        seen = torch.zeros(num_blocks, length, num_keys + 1, dtype=torch.bool, device=ids.device)
        seen.scatter_(2, ids.masked_fill(ids < 0, num_keys), True)
        seen = seen[..., :num_keys] | (ids[..., :1] < 0)
        causal = bucket.mask
        if causal is None:
            causal = torch.ones(1, 1, length, num_keys, dtype=torch.bool, device=ids.device).tril()
        buckets.append(Bucket(bucket.shape, bucket.keys, seen.unsqueeze(1) & causal))
    return buckets
