"""Routes on their way from the ranks that rolled out to the ranks that train: each rank gets only its
own layers of its own samples.

All ranks know all samples but for the ids in their routes, and compute the same plan of who trains
what, so nobody has to ask. A holder packs what its readers want (`moe.wire`), once, into memory that
the ranks of its node read their part of (`mrl.shared_bytes`); to other ranks it sends their part.

R rows of a sample (its tokens but the last), L MoE layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.align import pack_joined, pack_traces, places_of, split_rows
from moe.trace import unpack_trace
from moe.wire import from_wire, to_wire, wire_row_bytes
from mrl.shared_bytes import Handle, SharedBytes
from mrl.types import PackedRoutes, RoutingTrace, Sample, SampleGroup
from parallel.groups import Groups

Traces = Mapping[int, RoutingTrace]
"""By the sample's number in the step's list; without ids where another rank holds them."""


@dataclass(frozen=True)
class Want:
    """What a rank needs."""

    samples: tuple[int, ...]
    """Numbers in the step's list, ascending."""
    layers: tuple[int, ...]
    """Megatron's numbers."""


@dataclass(frozen=True)
class Parcel:
    """What one rank gets from another."""

    holder: int
    reader: int
    want: Want


@dataclass(frozen=True)
class _Seat:
    """What all ranks know of a rank."""

    dp_rank: int
    layers: tuple[int, ...]
    memory: Handle


def plan_parcels(wants: Mapping[int, Want], held: Sequence[Collection[int]]) -> list[Parcel]:
    """Who gets what from whom. Of several holders the lowest rank gives; who has it gets nothing.

    `held`: by rank, the numbers of the samples whose routes it has. Raises RuntimeError where nobody
    has what somebody wants.
    """
    holders: dict[int, int] = {}
    for rank in reversed(range(len(held))):
        holders |= dict.fromkeys(held[rank], rank)
    own = [frozenset(numbers) for numbers in held]
    parcels = []
    for reader, want in sorted(wants.items()):
        lost = [i for i in want.samples if i not in holders]
        if lost:
            raise RuntimeError(
                f"no rank holds the routes of samples {lost[:10]}, rank {reader} trains"
            )
        missing = [i for i in want.samples if i not in own[reader]] if want.layers else []
        missing.sort(key=lambda i: (holders[i], i))
        for holder, numbers in groupby(missing, key=lambda i: holders[i]):
            parcels.append(Parcel(holder, reader, Want(tuple(numbers), want.layers)))
    return parcels


class RouteExchange:
    """The exchange of one run. Every method is a collective: call it on all ranks."""

    def __init__(self, groups: Groups, layers: Sequence[int], *, share_memory: bool = True) -> None:
        """`layers`: the MoE layers of this rank. Without `share_memory` everything is sent, as between
        nodes."""
        self._rank, self._world = groups.rank, groups.dims.world
        self._memory = SharedBytes()
        self._seats: list[_Seat] = self._gather(
            _Seat(groups.dp_rank, tuple(layers), self._memory.handle)
        )
        self._readable: list[set[int]] = self._gather(
            {r for r, s in enumerate(self._seats) if share_memory and s.memory.can_be_read()}
        )
        """By rank, the ranks whose memory it reads."""
        self.bytes_per_token = 0.0
        """Of the last exchange, over all ranks: bytes read or sent over tokens, in the whole model
        (a rank with half the layers counts half a token). 0 where every rank had what it wants."""
        self.num_bytes_shared = self.num_bytes_sent = 0
        """Of the last exchange, by this rank: what it laid into its memory, as the system counts it,
        and into messages."""

    def deliver(
        self, samples: Sequence[Sample], shares: Sequence[Collection[int]]
    ) -> dict[int, PackedRoutes]:
        """`mrl.batching.RouteSource`. Raises ValueError where the routes lack a layer of the model."""
        traces = _traces(samples)
        wants = {
            rank: Want(tuple(sorted(i for i in shares[seat.dp_rank] if i in traces)), seat.layers)
            for rank, seat in enumerate(self._seats)
        }
        return self._exchange(traces, wants)

    def collect(self, groups: Sequence[SampleGroup], reader: int = 0) -> list[SampleGroup]:
        """The groups, with all their routes on the rank `reader`."""
        samples = [sample for group in groups for sample in group.samples]
        traces = _traces(samples)
        if not traces:
            return list(groups)
        want = Want(tuple(traces), next(iter(traces.values())).layer_numbers)
        for i, routes in self._exchange(traces, {reader: want}).items():
            if traces[i].expert_ids.is_meta:
                trace = unpack_trace(routes, traces[i])
                samples[i] = dataclasses.replace(samples[i], routing=trace)
        rest = iter(samples)
        return [dataclasses.replace(g, samples=[next(rest) for _ in g.samples]) for g in groups]

    def _exchange(self, traces: Traces, wants: Mapping[int, Want]) -> dict[int, PackedRoutes]:
        """What this rank wants, by sample."""
        own = [i for i, trace in traces.items() if not trace.expert_ids.is_meta]
        parcels = plan_parcels(wants, self._gather(own))
        self.bytes_per_token = bytes_per_token(traces, parcels)
        self.num_bytes_shared = self.num_bytes_sent = 0
        is_read = [parcel.holder in self._readable[parcel.reader] for parcel in parcels]
        read = [p for p, by_memory in zip(parcels, is_read, strict=True) if by_memory]
        sent = [p for p, by_memory in zip(parcels, is_read, strict=True) if not by_memory]
        self._write(read, traces)
        arriving = self._start_sending(sent, traces)
        if read:
            dist.barrier()  # everything is written
        routes = _own_routes(traces, wants.get(self._rank, Want((), ())))
        for parcel in read:
            if parcel.reader == self._rank:
                routes |= _unpack(self._read(parcel, read, traces), parcel, traces)
        for parcel, wire, work in arriving:
            work.wait()
            if parcel.reader == self._rank:
                routes |= _unpack(wire, parcel, traces)
        if read:
            dist.barrier()  # everything is read
            self.num_bytes_shared = self._memory.num_bytes
            self._memory.clear()
        return routes

    def _write(self, read: Sequence[Parcel], traces: Traces) -> None:
        offsets = _offsets(self._rank, read, traces)
        for layers, pages in groupby(offsets, key=lambda page: page[0]):
            numbers = [i for _, i in pages]  # side by side
            wire = _pack(Want(tuple(numbers), layers), traces)
            self._memory.write(offsets[layers, numbers[0]], wire.flatten())

    def _read(self, parcel: Parcel, read: Sequence[Parcel], traces: Traces) -> Tensor:
        """u8[rows of all its samples, width]."""
        wire, offsets = _empty_wire(parcel.want, traces), _offsets(parcel.holder, read, traces)
        rows = wire.split([traces[i].num_rows for i in parcel.want.samples])
        self._seats[parcel.holder].memory.read(
            [
                (offsets[parcel.want.layers, i], part.flatten())
                for i, part in zip(parcel.want.samples, rows, strict=True)
            ]
        )
        return wire

    def _start_sending(
        self, sent: Sequence[Parcel], traces: Traces
    ) -> list[tuple[Parcel, Tensor, Any]]:
        """This rank's parcels on their way, either way; the tensors must live until they arrive."""
        arriving = []
        for parcel in sent:
            if parcel.reader == self._rank:
                wire = _empty_wire(parcel.want, traces)
                arriving.append((parcel, wire, dist.irecv(wire, parcel.holder)))
        for parcel in sent:
            if parcel.holder == self._rank:
                wire = _pack(parcel.want, traces)
                self.num_bytes_sent += wire.numel()
                arriving.append((parcel, wire, dist.isend(wire, parcel.reader)))
        return arriving

    def _gather(self, value: Any) -> list[Any]:
        if self._world == 1:
            return [value]
        values = [None] * self._world
        dist.all_gather_object(values, value)
        return values


def bytes_per_token(traces: Traces, parcels: Sequence[Parcel]) -> float:
    """Bytes that the parcels hold over the tokens they are of; a share of the layers is that share of
    a token."""
    num_bytes = num_tokens = 0.0
    for parcel in parcels:
        for i in parcel.want.samples:
            share = len(parcel.want.layers) / len(traces[i].layer_numbers)
            num_bytes += _num_bytes(traces[i], parcel.want.layers)
            num_tokens += traces[i].num_rows * share
    return num_bytes / num_tokens if num_tokens else 0.0


def _own_routes(traces: Traces, want: Want) -> dict[int, PackedRoutes]:
    """What never travels: samples that this rank holds, and anything of no layer."""
    here = [i for i in want.samples if not traces[i].expert_ids.is_meta]
    routes = dict(zip(here, pack_traces([traces[i] for i in here], want.layers), strict=True))
    for i in () if want.layers else want.samples:
        trace = traces[i]
        empty = torch.empty((trace.num_rows, 0), dtype=torch.uint8)
        routes[i] = from_wire(empty, (), trace.num_experts, trace.expert_ids.shape[2])
    return routes


def _traces(samples: Sequence[Sample]) -> dict[int, RoutingTrace]:
    return {i: s.routing for i, s in enumerate(samples) if s.routing is not None}


def _width(trace: RoutingTrace, layers: Sequence[int]) -> int:
    places_of(trace.layer_numbers, layers)
    return wire_row_bytes(
        len(layers),
        trace.num_experts,
        trace.expert_ids.shape[2],
        with_weights=trace.expert_weights is not None,
    )


def _num_bytes(trace: RoutingTrace, layers: Sequence[int]) -> int:
    return trace.num_rows * _width(trace, layers)


def _offsets(
    holder: int, read: Sequence[Parcel], traces: Traces
) -> dict[tuple[tuple[int, ...], int], int]:
    """Where in the memory of `holder` the rows of (layers, sample) are; ranks that want the same, as
    those of a tensor-parallel group do, read the same."""
    wanted = {(p.want.layers, i) for p in read if p.holder == holder for i in p.want.samples}
    offsets, offset = {}, 0
    for layers, i in sorted(wanted):
        offsets[layers, i] = offset
        offset += _num_bytes(traces[i], layers)
    return offsets


def _pack(want: Want, traces: Traces) -> Tensor:
    """u8[rows of all samples, width]."""
    return to_wire(pack_joined([traces[i] for i in want.samples], want.layers))


def _empty_wire(want: Want, traces: Traces) -> Tensor:
    """u8[rows of all samples, width]."""
    num_rows = sum(traces[i].num_rows for i in want.samples)
    width = _width(traces[want.samples[0]], want.layers)
    return torch.empty((num_rows, width), dtype=torch.uint8)


def _unpack(wire: Tensor, parcel: Parcel, traces: Traces) -> dict[int, PackedRoutes]:
    numbers = parcel.want.samples
    first = traces[numbers[0]]
    routes = from_wire(
        wire,
        parcel.want.layers,
        first.num_experts,
        first.expert_ids.shape[2],
        with_weights=first.expert_weights is not None,
    )
    parts = split_rows(routes, [traces[i].num_rows for i in numbers])
    return dict(zip(numbers, parts, strict=True))
