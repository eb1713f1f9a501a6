"""Reference of `paged_attention` in fp64: one query and one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Return the result of `mrl.kernels.paged_attention` as f64[M, h, e], from the same arguments."""
    num_heads, num_groups = query.shape[1], k_cache.shape[1]
    out = torch.zeros(*query.shape[:2], v_cache.shape[2], dtype=torch.float64)
    starts = list(range(len(seq_lens) + 1)) if query_starts is None else query_starts.tolist()
    for i, (row, length) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        for m in range(starts[i], starts[i + 1]):
            position = length - (starts[i + 1] - m)
            first = 0 if window is None else max(0, position - window)
            slots = req_to_token[row, first : position + 1].long()
            for head in range(num_heads):
                group = head * num_groups // num_heads
                scores = k_cache[slots, group].double() @ query[m, head].double() * scale
                out[m, head] = torch.softmax(scores, 0) @ v_cache[slots, group].double()
    return out
