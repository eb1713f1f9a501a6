"""Rollouts on their way from the ranks that rolled out to the ranks that train: each rank gets the
tokens of its own samples, and of their routes its own layers.

All ranks know the outlines of all samples (`mrl.run.rollouts.outline`), and compute the same plan of
who trains what, so nobody has to ask; `mrl.exchange.transfers` carries what is planned. Routes
travel as bits (`moe.wire`), a token as its id and its log-prob, 8 bytes.

R rows of a sample (its tokens but the last), T tokens of a sample, L MoE layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from moe.align import pack_joined, pack_traces, places_of, split_rows
from moe.trace import unpack_trace
from moe.wire import from_wire, to_wire, wire_row_bytes
from mrl.exchange.transfers import TOKENS, ParcelExchange, Want
from mrl.types import PackedRoutes, RoutingTrace, Sample, SampleGroup
from parallel.mesh import Mesh

Traces = Mapping[int, RoutingTrace]
"""By the sample's number in the step's list; without ids where another rank holds them."""
BYTES_PER_TOKEN = 8
"""i32 id and f32 log-prob."""


class TokenCargo:
    """Tokens and the engine's log-probs: all ids of a sample, then all log-probs."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def num_bytes(self, sample: int, layers: tuple[int, ...]) -> int:
        return BYTES_PER_TOKEN * len(self._samples[sample].token_ids)

    def pack(self, want: Want) -> Tensor:
        parts = []
        for i in want.samples:
            sample = self._samples[i]
            ids = sample.token_ids.to(torch.int32)
            parts += [ids.view(torch.uint8), sample.rollout_logprobs.contiguous().view(torch.uint8)]
        return torch.cat(parts)

    def unpack(self, want: Want, wire: Tensor) -> dict[int, Sample]:
        """The samples of `want`, with all else as this rank has it."""
        parts = wire.split([self.num_bytes(i, want.layers) for i in want.samples])
        samples = {}
        for i, part in zip(want.samples, parts, strict=True):
            ids, logprobs = part.chunk(2)
            samples[i] = dataclasses.replace(
                self._samples[i],
                token_ids=ids.view(torch.int32).long(),
                rollout_logprobs=logprobs.view(torch.float32).clone(),
            )
        return samples


class RouteCargo:
    """Routes of some layers."""

    def __init__(self, traces: Traces) -> None:
        self.traces = traces

    def num_bytes(self, sample: int, layers: tuple[int, ...]) -> int:
        return self.traces[sample].num_rows * self._row_bytes(sample, layers)

    def _row_bytes(self, sample: int, layers: tuple[int, ...]) -> int:
        trace = self.traces[sample]
        has_weights = trace.expert_weights is not None
        shape = (trace.layer_numbers, trace.num_experts, trace.expert_ids.shape[2], has_weights)
        return _width(layers, *shape)

    def pack(self, want: Want) -> Tensor:
        return to_wire(pack_joined([self.traces[i] for i in want.samples], want.layers))

    def unpack(self, want: Want, wire: Tensor) -> dict[int, PackedRoutes]:
        first = self.traces[want.samples[0]]
        num_rows = [self.traces[i].num_rows for i in want.samples]
        routes = from_wire(
            wire.view(sum(num_rows), self._row_bytes(want.samples[0], want.layers)),
            want.layers,
            first.num_experts,
            first.expert_ids.shape[2],
            with_weights=first.expert_weights is not None,
        )
        return dict(zip(want.samples, split_rows(routes, num_rows), strict=True))


class RolloutExchange:
    """The exchange of one run. Every method is a collective: call it on all ranks."""

    def __init__(
        self, mesh: Mesh, layers: Sequence[int] = (), *, share_memory: bool = True
    ) -> None:
        """`layers`: the MoE layers of this rank. Without `share_memory` everything is sent, as between
        nodes."""
        self._rank, self._world = mesh.rank, mesh.dims.world
        self._parcels = ParcelExchange(
            mesh, (mesh.dp_rank, tuple(layers)), share_memory=share_memory
        )
        self.bytes_per_token = 0.0
        """Of the routes in the last `deliver`, over all ranks: bytes that they got over tokens, in the
        whole model (a rank with half the layers counts half a token). 0 where every rank had what it
        wants."""

    @property
    def num_bytes_shared(self) -> int:
        """What this rank laid into its memory in the last exchange."""
        return self._parcels.num_bytes_shared

    @property
    def num_bytes_sent(self) -> int:
        """What this rank sent in messages in the last exchange."""
        return self._parcels.num_bytes_sent

    def deliver(
        self, samples: Sequence[Sample], shares: Sequence[Collection[int]]
    ) -> dict[int, PackedRoutes]:
        """A `mrl.learn.batching.RouteSource`. Raises ValueError where the routes lack a layer."""
        traces = _traces(samples)
        of_dp = [tuple(sorted(i for i in share if i in traces)) for share in shares]
        wants = {
            rank: Want(of_dp[dp_rank], layers)
            for rank, (dp_rank, layers) in enumerate(self._parcels.places)
        }
        held = self._held(traces)
        self.bytes_per_token = bytes_per_token(traces, wants, held)
        routes = _own_routes(traces, wants[self._rank])
        cargo = RouteCargo(traces)
        for want, wire in self._parcels.exchange(cargo, wants, held):
            routes |= cargo.unpack(want, wire)
        return {i: routes[i] for i in wants[self._rank].samples}

    def deliver_tokens(
        self, samples: Sequence[Sample], shares: Sequence[Collection[int]]
    ) -> dict[int, Sample]:
        """`mrl.learn.batching.TokenSource`."""
        of_dp = [tuple(sorted(share)) for share in shares]
        places = enumerate(self._parcels.places)
        wants = {rank: Want(of_dp[dp_rank], (TOKENS,)) for rank, (dp_rank, _) in places}
        return self._tokens(samples, wants)

    def collect(self, groups: Sequence[SampleGroup], reader: int = 0) -> list[SampleGroup]:
        """The groups, whole on the rank `reader`."""
        return self.move(groups, [reader] * len(groups))

    def move(self, groups: Sequence[SampleGroup], readers: Sequence[int]) -> list[SampleGroup]:
        """The groups, each of them whole on its reader, and on the ranks that held it."""
        samples = [sample for group in groups for sample in group.samples]
        traces = _traces(samples)
        to = [r for group, r in zip(groups, readers, strict=True) for _ in group.samples]
        if self._world == 1 or not samples:
            return list(groups)
        numbers = {rank: [i for i, r in enumerate(to) if r == rank] for rank in set(to)}
        wants = {rank: Want(tuple(those), (TOKENS,)) for rank, those in numbers.items()}
        for i, sample in self._tokens(samples, wants).items():
            samples[i] = sample
        layers = next(iter(traces.values())).layer_numbers if traces else ()
        for rank, those in numbers.items():
            wants[rank] = Want(tuple(i for i in those if i in traces), layers)
        cargo = RouteCargo(traces)
        for want, wire in self._parcels.exchange(cargo, wants, self._held(traces)):
            for i, routes in cargo.unpack(want, wire).items():
                trace = unpack_trace(routes, traces[i])
                samples[i] = dataclasses.replace(samples[i], routing=trace)
        rest = iter(samples)
        return [dataclasses.replace(g, samples=[next(rest) for _ in g.samples]) for g in groups]

    def _tokens(self, samples: Sequence[Sample], wants: Mapping[int, Want]) -> dict[int, Sample]:
        """What this rank wants, by sample."""
        here = [i for i, sample in enumerate(samples) if sample.is_held]
        cargo = TokenCargo(samples)
        mine = wants.get(self._rank, Want((), ())).samples
        tokens = {i: samples[i] for i in mine if samples[i].is_held}
        for want, wire in self._parcels.exchange(cargo, wants, self._parcels.share_held(here)):
            tokens |= cargo.unpack(want, wire)
        return {i: tokens[i] for i in mine}

    def _held(self, traces: Traces) -> list[list[int]]:
        """By rank, the samples whose routes it has."""
        here = [i for i, trace in traces.items() if not trace.expert_ids.is_meta]
        return self._parcels.share_held(here)


def bytes_per_token(
    traces: Traces, wants: Mapping[int, Want], held: Sequence[Collection[int]]
) -> float:
    """Bytes of routes that the ranks get over the tokens they are of; a share of the layers is that
    share of a token."""
    cargo, num_bytes, num_tokens = RouteCargo(traces), 0, 0.0

    @cache
    def total(want: Want) -> tuple[int, int]:
        """(bytes, rows): wants of one data-parallel rank and one stage are the same."""
        return of(want.samples, want.layers)

    def of(numbers: Collection[int], layers: tuple[int, ...]) -> tuple[int, int]:
        rows = sum(traces[i].num_rows for i in numbers)
        return sum(cargo.num_bytes(i, layers) for i in numbers), rows

    for rank, want in wants.items():
        if not want.layers or not want.samples:
            continue
        own = of(frozenset(want.samples) & frozenset(held[rank]), want.layers)
        size, rows = (all_ - mine for all_, mine in zip(total(want), own, strict=True))
        share = len(want.layers) / len(traces[want.samples[0]].layer_numbers)
        num_bytes += size
        num_tokens += rows * share
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


@cache
def _width(
    layers: tuple[int, ...],
    of_model: tuple[int, ...],
    num_experts: int,
    topk: int,
    with_weights: bool,
) -> int:
    """Bytes a row. Raises ValueError where the routes lack one of the layers."""
    places_of(of_model, layers)
    return wire_row_bytes(len(layers), num_experts, topk, with_weights=with_weights)
