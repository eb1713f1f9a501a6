"""Align routing traces with the rows (tokens) that are processed by a rank's routers.

The traces of several samples are packed in the order of a micro-batch. Then only the layers and the
sequence-parallel rows of this rank are kept.

Dimensions: N packed tokens (in `local_routes` only the rows of this context-parallel rank), n rows of
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
    """Return the routes of a sample in the given layers: T-1 rows, one for each token but the last.

    layers: Megatron's 1-based layer numbers, in the order of the result; None takes all layers of
    the trace.

    Raises ValueError for a layer that the trace does not have, and for a row that contains the same
    expert twice in a layer.
    """
    return joined_routes([trace], trace.layer_numbers if layers is None else layers)


def routes_of_traces(traces: Sequence[RoutingTrace], layers: Sequence[int]) -> list[TokenRoutes]:
    """Return the result of `routes_of_trace` for each trace; an empty list if there are no traces.

    All traces are joined and checked at once, which is faster than one check per trace because most
    samples are short. Raises ValueError for traces of different models, for a layer that the traces
    do not have, and for a row that contains the same expert twice in a layer.
    """
    if not traces:
        return []
    return split_rows(joined_routes(traces, layers), [trace.num_rows for trace in traces])


def split_rows(routes: TokenRoutes, counts: Sequence[int]) -> list[TokenRoutes]:
    """Split routes into consecutive parts. Part i has `counts[i]` rows, and its tensors are views of
    those of `routes`."""
    sizes = list(counts)
    ids, captured = routes.expert_ids.split(sizes), routes.captured.split(sizes)
    weights = [None] * len(sizes) if routes.weights is None else routes.weights.split(sizes)
    return [
        dataclasses.replace(routes, expert_ids=own_ids, captured=own_captured, weights=own_weights)
        for own_ids, own_captured, own_weights in zip(ids, captured, weights, strict=True)
    ]


def joined_routes(traces: Sequence[RoutingTrace], layers: Sequence[int]) -> TokenRoutes:
    """Concatenate the rows of one or more traces, restricted to the given layers.

    layers: Megatron's 1-based layer numbers, in the order of the result.

    Raises ValueError for traces of different models, for a layer that the traces do not have, and
    for a row that contains the same expert twice in a layer.
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
    """Select the layers with the indices `places` from `rows` [R, L, ...], where R is the number of
    rows. Return a tensor [R, len(places), ...].

    The result is a view if the indices are consecutive, as for the layers of a pipeline stage.
    Otherwise it is a copy.
    """
    if places and places == list(range(places[0], places[0] + len(places))):
        return rows[:, places[0] : places[0] + len(places)]
    return take_bytes(rows, (slice(None), places))


def take_bytes(values: Tensor, index: Any) -> Tensor:
    """Return `values[index]`. The index must not address the last dimension, because the values are
    indexed as bytes: CUDA cannot index uint16."""
    return as_bytes(values)[index].view(values.dtype)


def as_bytes(values: Tensor) -> Tensor:
    """Return the bytes of `values` as a view, u8 with a longer last dimension."""
    return values.view(torch.uint8)


def with_native_rows(routes: TokenRoutes, native: Tensor) -> TokenRoutes:
    """Return a copy of `routes` in which some rows lose their captured route: those for which
    `native`, bool[N], is true. In these rows the trainer's routers choose the experts."""
    return dataclasses.replace(routes, captured=routes.captured & ~native)


def join_routes(
    parts: Sequence[TokenRoutes | None],
    lengths: Sequence[int],
    padded_lengths: Sequence[int] | None = None,
) -> TokenRoutes:
    """Concatenate the routes of the sequences of a micro-batch, in packing order.

    parts: for each sequence of T tokens its T-1 rows, or None if the sequence has no routes. At
    least one part must not be None.
    lengths: T of each sequence.
    padded_lengths: the number of rows that each sequence occupies in the result; by default its
    length.

    The result has no captured route for the last token of a sequence, for padding, and for
    sequences without routes. All K ids of such a row are 0. The row must not be replayed, because a
    router that is given the same id K times would use only one expert. Raises ValueError for a part
    that does not have T-1 rows, and for parts of different layers or models.
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
    """Return the index in `layer_numbers` of each layer number in `wanted`. Raises ValueError for a
    layer number that is missing."""
    place = {number: i for i, number in enumerate(layer_numbers)}
    missing = [number for number in wanted if number not in place]
    if missing:
        raise ValueError(
            f"routes: the model has MoE layers {missing}, the traces only {tuple(layer_numbers)}; "
            "they come from another model"
        )
    return [place[number] for number in wanted]


def row_slice(num_tokens: int, tp_rank: int, tp_size: int) -> slice:
    """Return the slice of the `num_tokens` packed rows that is processed by the routers of
    tensor-parallel rank `tp_rank` under sequence parallelism."""
    rows = num_tokens // tp_size
    return slice(tp_rank * rows, (tp_rank + 1) * rows)


@dataclass(frozen=True)
class RouterRows:
    """Properties of the rows (tokens) that each router of this rank processes in a micro-batch.

    A row that several samples share (`mrl.shared_prefixes`) has an entry for each of them, so there
    are m entries for n rows. Without shared rows m = n, and the entries are the rows.
    """

    counted: Tensor
    """bool[m]: whether the row counts in the expert loads and router losses. True up to and including
    the last loss token of a sample; false after it, for padding, and for samples without a loss
    token."""
    leading: Tensor
    """bool[m]: true for the rows before the last loss token of their sample. The routes of these
    rows affect the loss, because a later loss token attends to them."""
    segments: Tensor
    """i64[m]: for each entry the index of its sequence in the micro-batch."""
    num_segments: int
    """The number of sequences in the micro-batch."""
    source: Tensor | None = None
    """i64[m]: the row of each entry; None if the entries are the rows."""
    num_rows: int | None = None
    """n, if rows are shared; otherwise None."""

    def weights(self, flags: Tensor) -> Tensor:
        """Return, for each of the n rows, the number of its entries whose flag in bool[m] is true.

        A sum over entries is then a sum over rows with these weights. The result is i16[n] if rows
        are shared. Otherwise it is `flags`, because each row has one entry.
        """
        if self.source is None:
            return flags
        assert self.num_rows is not None
        zeros = torch.zeros(self.num_rows, dtype=torch.int16, device=flags.device)
        return zeros.index_add_(0, self.source, flags.to(torch.int16))

    def of(self, values: Tensor, dim: int = 0) -> Tensor:
        """Spread values of the n rows to the m entries, differentiably. `dim` is the dimension of the
        rows."""
        return values if self.source is None else values.index_select(dim, self.source)


def router_rows(
    batch: MicroBatch,
    rows: slice | Tensor,
    source: Tensor | None = None,
    num_rows: int | None = None,
) -> RouterRows:
    """Return the `RouterRows` of one rank. `rows`, a slice or indices i64[m], selects the packed
    tokens of `batch` that the routers of the rank process. `source` and `num_rows` are those of
    `RouterRows`."""
    lengths = batch.cu_seqlens.diff().long()
    so_far = batch.loss_mask.long().cumsum(0)
    by_the_end = so_far[batch.cu_seqlens[1:].long() - 1]
    numbers = torch.arange(lengths.numel(), device=lengths.device)
    segments = numbers.repeat_interleave(lengths, output_size=batch.num_tokens)[rows]
    left = by_the_end[segments] - so_far[rows]
    leading = left > 0
    counted = leading | batch.loss_mask[rows]
    return RouterRows(counted, leading, segments, lengths.numel(), source, num_rows)


def local_routes(
    routes: TokenRoutes, owned_layers: Iterable[int], tp_rank: int, tp_size: int
) -> dict[int, Route]:
    """Return the routes that this rank needs, one per layer in `owned_layers`, by layer number.

    Each route covers the n rows of this rank and has gate weights if `routes` has them. In a row
    without a captured route all K ids are NATIVE_ROUTE. Raises ValueError for a layer that `routes`
    does not have.
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
