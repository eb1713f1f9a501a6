"""Fit routing traces to what a rank's routers see: packed rows, sequence-parallel slices, own layers.

N packed tokens (under context parallelism: those of this rank), n rows of this rank (N / tp under
sequence parallelism), L MoE layers, K experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.kernels.routes import native_routes, pack_routes, unpack_routes
from mrl.types import MicroBatch, PackedRoutes, RoutingTrace


def pack_traces(
    traces: Sequence[RoutingTrace | None],
    lengths: Sequence[int],
    padded_lengths: Sequence[int] | None = None,
) -> PackedRoutes:
    """Traces of sequences of `lengths` tokens, in packing order.

    `padded_lengths`: what each of them takes up; by default no more than its length.

    The last token of each sequence, padding, and sequences without a trace get the native route:
    expert ids of 0 would send them to expert 0 K times over, and a duplicate id silently loses an
    expert. Raises ValueError for traces that do not fit their lengths or each other.
    """
    first = next(trace for trace in traces if trace is not None)
    _, num_layers, topk = first.expert_ids.shape
    rooms = lengths if padded_lengths is None else padded_lengths
    packed = native_routes(sum(rooms), num_layers, first.num_experts, topk)
    start = 0
    for trace, length, room in zip(traces, lengths, rooms, strict=True):
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
        start += room
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
    """bool[n]: tokens of samples, up to their last loss token; neither padding nor masked samples."""
    leading: Tensor
    """bool[n]: those of them that a later loss token depends on: their routes must be captured."""
    segments: Tensor
    """i64[n]: the row's sequence."""
    num_segments: int
    """S."""


def router_rows(batch: MicroBatch, rows: slice | Tensor) -> RouterRows:
    """The packed tokens `rows` (a slice, or i64[n]) of a micro-batch as a router sees them."""
    lengths = batch.cu_seqlens.diff().long()
    so_far = batch.loss_mask.long().cumsum(0)
    by_the_end = so_far[batch.cu_seqlens[1:].long() - 1]
    numbers = torch.arange(lengths.numel(), device=lengths.device)
    segments = numbers.repeat_interleave(lengths, output_size=batch.num_tokens)[rows]
    left = by_the_end[segments] - so_far[rows]
    leading = left > 0
    return RouterRows(leading | batch.loss_mask[rows], leading, segments, lengths.numel())


def local_routes(
    routes: PackedRoutes, owned_layers: Iterable[int], tp_rank: int, tp_size: int
) -> dict[int, Tensor]:
    """The routes of the layers that this chunk owns, for the rows that this rank sees: i64[n, K]."""
    owned = tuple(owned_layers)
    place = {number: i for i, number in enumerate(routes.layer_numbers)}
    missing = [number for number in owned if number not in place]
    if missing:
        raise ValueError(
            f"routes: the model has MoE layers {missing}, the traces only {routes.layer_numbers}; "
            "they come from another model"
        )
    rows = row_slice(len(routes.packed), tp_rank, tp_size)
    ids = unpack_routes(
        routes.packed,
        num_experts=routes.num_experts,
        topk=routes.topk,
        layers=[place[number] for number in owned],
        start=rows.start,
        stop=rows.stop,
    )
    return dict(zip(owned, ids, strict=True))
