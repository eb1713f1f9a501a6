"""Align routing traces with the rows that the routers of a rank see.

The traces of several samples are packed in the order of a micro-batch, then reduced to the layers
and the sequence-parallel rows of this rank.

Dimensions: N packed tokens (in `local_routes` only those of this context-parallel rank), n rows of
this rank (N / tp under sequence parallelism), T tokens of a sample, L MoE layers, K experts per
token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.route_rows import id_dtype
from moe.routes import GatedRoute, Route
from moe.trace import refuse_repeats
from mrl.types import NATIVE_ROUTE, MicroBatch, RoutingTrace, TokenRoutes


def routes_of_trace(trace: RoutingTrace, layers: Sequence[int] | None = None) -> TokenRoutes:
    """Return the routes of a sample's T-1 rows in `layers`, in this order; None means all layers
    of the trace. `layers` are Megatron's layer numbers.

    Raises ValueError for a layer that the trace does not have, and for a row that repeats an
    expert.
    """
    return joined_routes([trace], trace.layer_numbers if layers is None else layers)


def routes_of_traces(traces: Sequence[RoutingTrace], layers: Sequence[int]) -> list[TokenRoutes]:
    """Return the result of `routes_of_trace` for each trace; an empty list without traces.

    Most samples are short, so it is faster to join all traces and check them at once. Raises
    ValueError for traces of different models, a layer that they do not have, and a row that repeats
    an expert.
    """
    if not traces:
        return []
    return split_rows(joined_routes(traces, layers), [trace.num_rows for trace in traces])


def split_rows(routes: TokenRoutes, counts: Sequence[int]) -> list[TokenRoutes]:
    """Split routes into consecutive parts, of which part i has `counts[i]` rows. The parts are
    views."""
    sizes = list(counts)
    ids, captured = routes.expert_ids.split(sizes), routes.captured.split(sizes)
    weights = [None] * len(sizes) if routes.weights is None else routes.weights.split(sizes)
    return [
        dataclasses.replace(routes, expert_ids=own_ids, captured=own_captured, weights=own_weights)
        for own_ids, own_captured, own_weights in zip(ids, captured, weights, strict=True)
    ]


def joined_routes(traces: Sequence[RoutingTrace], layers: Sequence[int]) -> TokenRoutes:
    """Join all rows of one or more traces end to end. `layers` are Megatron's numbers of the layers
    in the result, in order.

    Raises ValueError for traces of different models, a layer that they do not have, and a row that
    repeats an expert.
    """
    kinds = {
        (t.layer_numbers, t.num_experts, t.expert_ids.shape[2], t.expert_weights is not None)
        for t in traces
    }
    if len(kinds) > 1:
        raise ValueError(
            "routing traces of different models in one batch (layers, experts, experts per token, with "
            "weights): " + ", ".join(map(str, sorted(kinds)))
        )
    ((layer_numbers, num_experts, _, _),) = kinds
    wanted = tuple(layers)
    places = list(places_of(layer_numbers, wanted))
    ids = torch.cat([_of_layers(trace.expert_ids, places) for trace in traces])
    ids = ids.to(id_dtype(num_experts))
    refuse_repeats(ids, wanted)
    weights = [trace.expert_weights for trace in traces if trace.expert_weights is not None]
    gates = torch.cat([_of_layers(each, places) for each in weights]) if weights else None
    captured = torch.ones(len(ids), dtype=torch.bool)
    return TokenRoutes(ids, captured, wanted, num_experts, gates)


def _of_layers(rows: Tensor, places: list[int]) -> Tensor:
    """Return the layers with the indices `places` from `rows` [R, L, ...], as
    [R, len(places), ...].

    Consecutive indices, which the layers of a pipeline stage have, give a view; other indices give
    a copy.
    """
    if places and places == list(range(places[0], places[0] + len(places))):
        return rows[:, places[0] : places[0] + len(places)]
    return take_bytes(rows, (slice(None), places))


def take_bytes(values: Tensor, index: Any) -> Tensor:
    """Return `values[index]` for an `index` that does not address the last dimension. The values
    are indexed as bytes, because CUDA cannot index uint16."""
    return values.view(torch.uint8)[index].view(values.dtype)


def with_native_rows(routes: TokenRoutes, native: Tensor) -> TokenRoutes:
    """Return the routes, with the rows where `native` bool[N] is true marked as having no captured
    route."""
    return dataclasses.replace(routes, captured=routes.captured & ~native)


def join_routes(
    parts: Sequence[TokenRoutes | None],
    lengths: Sequence[int],
    padded_lengths: Sequence[int] | None = None,
) -> TokenRoutes:
    """Join the routes of the sequences of a micro-batch, in packing order.

    parts: the T-1 rows of each sequence of T tokens, or None for a sequence without routes. At
    least one is not None. lengths: T of each sequence. padded_lengths: the number of rows that each
    sequence occupies in the result; by default its length.

    The rows of each sequence's last token, of padding and of sequences without routes have no
    captured route. All K ids of such a row are 0, and the row must not be replayed, because a row
    with repeated ids silently loses experts. Raises ValueError for parts that do not have T-1 rows,
    or that are of different layers or models.
    """
    first = next(part for part in parts if part is not None)
    rooms = list(lengths if padded_lengths is None else padded_lengths)
    ids = first.expert_ids.new_zeros(sum(rooms), *first.expert_ids.shape[1:])
    captured = torch.zeros(len(ids), dtype=torch.bool)
    weights = None
    if first.weights is not None:
        weights = first.weights.new_zeros(ids.shape)
    start = 0
    for part, length, room in zip(parts, lengths, rooms, strict=True):
        if part is not None:
            _check_same_model(part, first)
            num_rows = len(part.expert_ids)
            if num_rows != length - 1:
                raise ValueError(
                    f"routing trace: expected {length - 1} rows for {length} tokens (the last token "
                    f"has none), got {num_rows}"
                )
            rows = slice(start, start + num_rows)
            ids[rows], captured[rows] = part.expert_ids, part.captured
            if weights is not None and part.weights is not None:
                weights[rows] = part.weights
        start += room
    return dataclasses.replace(first, expert_ids=ids, captured=captured, weights=weights)


def _check_same_model(part: TokenRoutes, first: TokenRoutes) -> None:
    if part.layer_numbers != first.layer_numbers:
        raise ValueError(
            f"routing traces of different layers in one batch: {part.layer_numbers} and "
            f"{first.layer_numbers}"
        )
    kind, first_kind = (
        f"{p.expert_ids.shape[2]} of {p.num_experts} experts{' with weights' * (p.weights is not None)}"
        for p in (part, first)
    )
    if kind != first_kind:
        raise ValueError(
            f"routing traces of different models in one batch: {kind} and {first_kind}"
        )


def places_of(layer_numbers: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return each wanted layer's index in `layer_numbers`. Raises ValueError for a missing layer."""
    place = {number: i for i, number in enumerate(layer_numbers)}
    missing = [number for number in wanted if number not in place]
    if missing:
        raise ValueError(
            f"routes: the model has MoE layers {missing}, the traces only {tuple(layer_numbers)}; "
            "they come from another model"
        )
    return [place[number] for number in wanted]


def row_slice(num_tokens: int, tp_rank: int, tp_size: int) -> slice:
    """Return the slice of packed rows that the routers of a tensor-parallel rank see under sequence
    parallelism."""
    rows = num_tokens // tp_size
    return slice(tp_rank * rows, (tp_rank + 1) * rows)


@dataclass(frozen=True)
class RouterRows:
    """The n rows that a router of this rank sees, and which of them the statistics count."""

    counted: Tensor
    """bool[n]: true for the tokens of a sample up to and including its last loss token; false for
    padding and for samples without a loss token."""
    leading: Tensor
    """bool[n]: true for the rows before the last loss token of their sample. Such a row must have a
    captured route, because a later loss token depends on it."""
    segments: Tensor
    """i64[n]: the index, in the micro-batch, of the sequence to which each row belongs."""
    num_segments: int
    """The number of sequences in the micro-batch."""


def router_rows(batch: MicroBatch, rows: slice | Tensor) -> RouterRows:
    """Return the `RouterRows` for the packed tokens `rows` (a slice, or indices i64[n])."""
    lengths = batch.cu_seqlens.diff().long()
    so_far = batch.loss_mask.long().cumsum(0)
    by_the_end = so_far[batch.cu_seqlens[1:].long() - 1]
    numbers = torch.arange(lengths.numel(), device=lengths.device)
    segments = numbers.repeat_interleave(lengths, output_size=batch.num_tokens)[rows]
    left = by_the_end[segments] - so_far[rows]
    leading = left > 0
    return RouterRows(leading | batch.loss_mask[rows], leading, segments, lengths.numel())


def local_routes(
    routes: TokenRoutes, owned_layers: Iterable[int], tp_rank: int, tp_size: int
) -> dict[int, Route]:
    """Return, by layer number, the routes of the layers `owned_layers` for the rows that this rank
    sees.

    A route has gate weights if `routes` has them. In a row without a captured route all K ids are
    NATIVE_ROUTE. Raises ValueError for a layer that the routes do not have.
    """
    owned = tuple(owned_layers)
    rows = row_slice(len(routes.expert_ids), tp_rank, tp_size)
    places = places_of(routes.layer_numbers, owned)
    ids = _of_layers(routes.expert_ids[rows], places).transpose(0, 1).contiguous().long()
    ids.masked_fill_(~routes.captured[rows, None], NATIVE_ROUTE)
    if routes.weights is None:
        return dict(zip(owned, ids, strict=True))
    weights = routes.weights[rows]
    return {
        number: GatedRoute(of_layer, weights[:, place])
        for number, place, of_layer in zip(owned, places, ids, strict=True)
    }
