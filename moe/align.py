"""Fit routing traces to what a rank's routers see: packed rows, sequence-parallel slices, own layers.

N packed tokens, n rows of this rank (N / tp under sequence parallelism), L MoE layers, K experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.kernels.routes import native_routes, pack_routes, unpack_routes
from mrl.types import MicroBatch, PackedRoutes, RoutingTrace


def pack_traces(traces: Sequence[RoutingTrace | None], lengths: Sequence[int]) -> PackedRoutes:
    """Traces of sequences of `lengths` tokens, in packing order.

    The last token of each sequence, padding, and sequences without a trace get the native route:
    expert ids of 0 would send them to expert 0 K times over, and a duplicate id silently loses an
    expert. Raises ValueError for traces that do not fit their lengths or each other.
    """
    first = next(trace for trace in traces if trace is not None)
    _, num_layers, topk = first.expert_ids.shape
    packed = native_routes(sum(lengths), num_layers, first.num_experts, topk)
    start = 0
    for trace, length in zip(traces, lengths, strict=True):
        if trace is not None:
            if trace.layer_numbers != first.layer_numbers:
                raise ValueError(
                    f"routing traces of different layers in one batch: {trace.layer_numbers} and "
                    f"{first.layer_numbers}"
                )
            kind, first_kind = _experts(trace), _experts(first)
            if kind != first_kind:
                raise ValueError(
                    f"routing traces of different models in one batch: {kind} and {first_kind}"
                )
            if len(trace.expert_ids) != length - 1:
                raise ValueError(
                    f"routing trace: expected {length - 1} rows for {length} tokens (the last token "
                    f"has none), got {len(trace.expert_ids)}"
                )
            rows = packed[start : start + length - 1]
            pack_routes(trace.expert_ids, trace.num_experts, out=rows)
        start += length
    return PackedRoutes(packed, first.layer_numbers, first.num_experts, topk)


def _experts(trace: RoutingTrace) -> str:
    return f"{trace.expert_ids.shape[2]} of {trace.num_experts} experts"


def row_slice(num_tokens: int, tp_rank: int, tp_size: int) -> slice:
    """The packed rows that a router sees on this tensor-parallel rank (sequence parallelism)."""
    rows = num_tokens // tp_size
    return slice(tp_rank * rows, (tp_rank + 1) * rows)


@dataclass(frozen=True)
class RouterRows:
    """What the rows of a router are: of this rank, n of them; S sequences in the whole micro-batch."""

    counted: Tensor
    """bool[n]: rows of a sequence with a loss token; padding and masked samples are not."""
    segments: Tensor
    """i64[n]: the row's sequence."""
    num_segments: int
    """S."""


def router_rows(batch: MicroBatch, rows: slice) -> RouterRows:
    """The part `rows` of a micro-batch as a router sees it."""
    lengths = batch.cu_seqlens.diff().long()
    ends = batch.cu_seqlens[1:].long() - 1
    loss_tokens = batch.loss_mask.long().cumsum(0)[ends]
    counted = loss_tokens.diff(prepend=loss_tokens.new_zeros(1)) > 0
    numbers = torch.arange(lengths.numel(), device=lengths.device)
    segments = numbers.repeat_interleave(lengths, output_size=batch.num_tokens)
    return RouterRows(counted[segments][rows], segments[rows], lengths.numel())


def local_routes(
    batch: MicroBatch, owned_layers: Iterable[int], tp_rank: int, tp_size: int
) -> dict[int, Tensor]:
    """The routes of the layers that this chunk owns, for the rows that this rank sees: i64[n, K]."""
    routes = batch.routes
    assert routes is not None
    owned = tuple(owned_layers)
    place = {number: i for i, number in enumerate(routes.layer_numbers)}
    missing = [number for number in owned if number not in place]
    if missing:
        raise ValueError(
            f"routes: the model has MoE layers {missing}, the traces only {routes.layer_numbers}; "
            "they come from another model"
        )
    rows = row_slice(batch.num_tokens, tp_rank, tp_size)
    ids = unpack_routes(
        routes.packed,
        num_experts=routes.num_experts,
        topk=routes.topk,
        layers=[place[number] for number in owned],
        start=rows.start,
        stop=rows.stop,
    )
    return dict(zip(owned, ids, strict=True))
