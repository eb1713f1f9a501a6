"""Fit routing traces to what a rank's routers see: packed rows, sequence-parallel slices, own layers.

N packed tokens (under context parallelism: those of this rank), n rows of this rank (N / tp under
sequence parallelism), L MoE layers, K experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.routes import GatedRoute, Route
from mrl.kernels.routes import native_routes, pack_routes, unpack_routes
from mrl.types import MicroBatch, PackedRoutes, RoutingTrace


def pack_trace(trace: RoutingTrace, layers: Sequence[int] | None = None) -> PackedRoutes:
    """Pack the T-1 rows of a sample, of all its layers or of these (Megatron's numbers), in
    their order.

    Raises ValueError for a layer that the trace does not have.
    """
    return pack_joined([trace], trace.layer_numbers if layers is None else layers)


def pack_traces(traces: Sequence[RoutingTrace], layers: Sequence[int]) -> list[PackedRoutes]:
    """`pack_trace` of each, in one call of the kernel: most samples are short."""
    if not traces:
        return []
    return split_rows(pack_joined(traces, layers), [trace.num_rows for trace in traces])


def split_rows(routes: PackedRoutes, counts: Sequence[int]) -> list[PackedRoutes]:
    """Split into consecutive rows, as views."""
    parts = routes.packed.split(list(counts))
    if routes.weights is None:
        return [dataclasses.replace(routes, packed=part) for part in parts]
    weights = routes.weights.split(list(counts))
    return [
        dataclasses.replace(routes, packed=part, weights=own)
        for part, own in zip(parts, weights, strict=True)
    ]


def pack_joined(traces: Sequence[RoutingTrace], layers: Sequence[int]) -> PackedRoutes:
    """All rows of one or more traces, end to end. Raises ValueError for traces of different models."""
    kinds = {
        (t.layer_numbers, t.num_experts, t.expert_ids.shape[2], t.expert_weights is not None)
        for t in traces
    }
    if len(kinds) > 1:
        raise ValueError(
            "routing traces of different models in one batch (layers, experts, experts per token, with "
            "weights): " + ", ".join(map(str, sorted(kinds)))
        )
    ((layer_numbers, num_experts, topk, _),) = kinds
    wanted = tuple(layers)
    places = list(places_of(layer_numbers, wanted))
    ids = torch.cat([_of_layers(trace.expert_ids, places) for trace in traces])
    weights = [trace.expert_weights for trace in traces if trace.expert_weights is not None]
    gates = torch.cat([_of_layers(each, places) for each in weights]) if weights else None
    return PackedRoutes(pack_routes(ids, num_experts), wanted, num_experts, topk, gates)


def _of_layers(rows: Tensor, places: list[int]) -> Tensor:
    """[R, len(places), K]; neighbouring layers, as those of a pipeline stage are, as a view."""
    if places and places == list(range(places[0], places[0] + len(places))):
        return rows[:, places[0] : places[0] + len(places)]
    return rows[:, places]


def with_native_rows(routes: PackedRoutes, native: Tensor) -> PackedRoutes:
    """Mark the rows of bool[N] as rows without a captured route."""
    _, num_layers, _ = routes.packed.shape
    packed = routes.packed.clone()
    packed[native] = native_routes(1, num_layers, routes.num_experts, routes.topk)
    return dataclasses.replace(routes, packed=packed)


def join_routes(
    parts: Sequence[PackedRoutes | None],
    lengths: Sequence[int],
    padded_lengths: Sequence[int] | None = None,
) -> PackedRoutes:
    """Routes of sequences of `lengths` tokens, T-1 rows each, in packing order.

    `padded_lengths`: what each of them takes up; by default no more than its length.

    The last token of each sequence, padding, and sequences without routes get the native route:
    expert ids of 0 would send them to expert 0 K times over, and a duplicate id silently loses an
    expert. Raises ValueError for routes that do not fit their lengths or each other.
    """
    first = next(part for part in parts if part is not None)
    rooms = lengths if padded_lengths is None else padded_lengths
    num_layers = len(first.layer_numbers)
    native = native_routes(max(rooms), num_layers, first.num_experts, first.topk)
    rows = []
    for part, length, room in zip(parts, lengths, rooms, strict=True):
        if part is None:
            rows.append(native[:room])
            continue
        _check_same_model(part, first)
        if len(part.packed) != length - 1:
            raise ValueError(
                f"routing trace: expected {length - 1} rows for {length} tokens (the last token "
                f"has none), got {len(part.packed)}"
            )
        rows += [part.packed, native[: room - length + 1]]
    return dataclasses.replace(
        first, packed=torch.cat(rows), weights=_join_weights(parts, first, rooms)
    )


def _join_weights(
    parts: Sequence[PackedRoutes | None], first: PackedRoutes, rooms: Sequence[int]
) -> Tensor | None:
    """f32[N, L, K], 0 where no route was captured; None where no weights were."""
    if first.weights is None:
        return None
    joined = first.weights.new_zeros(sum(rooms), *first.weights.shape[1:])
    for part, place in zip(parts, joined.split(list(rooms)), strict=True):
        if part is not None and part.weights is not None:
            place[: len(part.weights)] = part.weights
    return joined


def _check_same_model(part: PackedRoutes, first: PackedRoutes) -> None:
    if part.layer_numbers != first.layer_numbers:
        raise ValueError(
            f"routing traces of different layers in one batch: {part.layer_numbers} and "
            f"{first.layer_numbers}"
        )
    kind, first_kind = (
        f"{p.topk} of {p.num_experts} experts{' with weights' * (p.weights is not None)}"
        for p in (part, first)
    )
    if kind != first_kind:
        raise ValueError(
            f"routing traces of different models in one batch: {kind} and {first_kind}"
        )


def places_of(layer_numbers: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return each wanted layer's index in `layer_numbers`. Raises ValueError for a missing one."""
    place = {number: i for i, number in enumerate(layer_numbers)}
    missing = [number for number in wanted if number not in place]
    if missing:
        raise ValueError(
            f"routes: the model has MoE layers {missing}, the traces only {tuple(layer_numbers)}; "
            "they come from another model"
        )
    return [place[number] for number in wanted]


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
) -> dict[int, Route]:
    """The routes of the layers that this chunk owns, for the rows that this rank sees; with their gate
    weights where those were captured."""
    owned = tuple(owned_layers)
    rows = row_slice(len(routes.packed), tp_rank, tp_size)
    places = places_of(routes.layer_numbers, owned)
    ids = unpack_routes(
        routes.packed,
        num_experts=routes.num_experts,
        topk=routes.topk,
        layers=places,
        start=rows.start,
        stop=rows.stop,
    )
    if routes.weights is None:
        return dict(zip(owned, ids, strict=True))
    weights = routes.weights[rows]
    return {
        number: GatedRoute(of_layer, weights[:, place])
        for number, place, of_layer in zip(owned, places, ids, strict=True)
    }
