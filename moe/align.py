"""Fit routing traces to what a rank's routers see: packed rows, sequence-parallel slices, own layers.

N packed tokens, n rows of this rank (N / tp under sequence parallelism), L MoE layers, K experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mrl.types import NATIVE_ROUTE, MicroBatch, RoutingTrace


def pack_traces(
    traces: Sequence[RoutingTrace | None], lengths: Sequence[int], num_tokens: int
) -> tuple[Tensor, tuple[int, ...]]:
    """Traces of sequences of `lengths` tokens -> (i16[N, L, K], layer numbers), in packing order.

    The last token of each sequence, padding, and sequences without a trace get NATIVE_ROUTE: zeros
    would send them to expert 0 K times over, and a duplicate id silently loses an expert.
    """
    first = next(trace for trace in traces if trace is not None)
    _, num_layers, topk = first.expert_ids.shape
    packed = torch.full((num_tokens, num_layers, topk), NATIVE_ROUTE, dtype=torch.int16)
    start = 0
    for trace, length in zip(traces, lengths, strict=True):
        if trace is not None:
            if trace.layer_numbers != first.layer_numbers:
                raise ValueError(
                    f"routing traces of different layers in one batch: {trace.layer_numbers} and "
                    f"{first.layer_numbers}"
                )
            if len(trace.expert_ids) != length - 1:
                raise ValueError(
                    f"routing trace: expected {length - 1} rows for {length} tokens (the last token "
                    f"has none), got {len(trace.expert_ids)}"
                )
            packed[start : start + length - 1] = trace.expert_ids.to(torch.int16)
        start += length
    return packed, first.layer_numbers


def row_slice(num_tokens: int, tp_rank: int, tp_size: int) -> slice:
    """The packed rows that a router sees on this tensor-parallel rank (sequence parallelism)."""
    rows = num_tokens // tp_size
    return slice(tp_rank * rows, (tp_rank + 1) * rows)


def local_routes(
    batch: MicroBatch, owned_layers: Iterable[int], tp_rank: int, tp_size: int
) -> dict[int, Tensor]:
    """The routes of the layers that this chunk owns, for the rows that this rank sees: i64[n, K]."""
    assert batch.expert_ids is not None
    rows = batch.expert_ids[row_slice(batch.num_tokens, tp_rank, tp_size)]
    place = {number: i for i, number in enumerate(batch.layer_numbers)}
    missing = [number for number in owned_layers if number not in place]
    if missing:
        raise ValueError(
            f"routes: the model has MoE layers {missing}, the traces only {batch.layer_numbers}; "
            "they come from another model"
        )
    return {number: rows[:, place[number]].long() for number in owned_layers}
