"""This module brings rollouts from the ranks that generated them to the ranks that train on them: each
rank gets the tokens of the samples that it trains on, and their routes in the layers that it holds.

All ranks know the outlines of all samples (`mrl.run.rollouts.outline`) and compute alike who trains on
what, so nobody has to ask; `mrl.exchange.transfers` moves the bytes. Routes travel packed
(`moe.route_rows`), a token as its id and its log-prob, 8 bytes; one that was drawn from a truncated
distribution with the number of the kept tokens and their ids as well, 4 bytes each.

R rows of a sample (its tokens but the last), T tokens of a sample, L MoE layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from moe.align import pack_joined, pack_traces, places_of, split_rows
from moe.route_rows import from_rows, row_bytes, to_rows
from moe.trace import unpack_trace
from mrl.exchange.transfers import TOKENS, Selection
from mrl.exchange.transport import Transport
from mrl.sampling_mask import SamplingMask
from mrl.types import PackedRoutes, RoutingTrace, Sample, SampleGroup
from parallel.mesh import Mesh

Traces = Mapping[int, RoutingTrace]
"""Traces by the index of their sample in the step's list; without ids where another rank holds them."""
BYTES_PER_NUMBER = 4
"""Ids and counts are i32, log-probs are f32."""


class TokenCargo:
    """Packs tokens and the engine's log-probs: all ids of a sample, then all its log-probs, then its
    sampling mask where it has one."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def num_bytes(self, sample: int, layers: tuple[int, ...]) -> int:
        return BYTES_PER_NUMBER * sum(self._sizes(sample))

    def _sizes(self, sample: int) -> list[int]:
        """Return how many numbers there are: ids, log-probs, kept tokens, their counts."""
        mask, num_tokens = self._samples[sample].sampling_mask, len(self._samples[sample].token_ids)
        sizes = [num_tokens, num_tokens]
        return sizes if mask is None else [*sizes, len(mask.token_ids), num_tokens]

    def pack(self, selection: Selection) -> Tensor:
        parts = []
        for i in selection.samples:
            sample = self._samples[i]
            ids = sample.token_ids.to(torch.int32)
            tensors = [ids, sample.rollout_logprobs]
            if (mask := sample.sampling_mask) is not None:
                tensors += [mask.token_ids, mask.counts]
            parts += [tensor.contiguous().view(torch.uint8) for tensor in tensors]
        return torch.cat(parts)

    def unpack(self, selection: Selection, rows: Tensor) -> dict[int, Sample]:
        """Return the selected samples, with all other fields as this rank has them."""
        parts = rows.split([self.num_bytes(i, selection.layers) for i in selection.samples])
        samples = {}
        for i, part in zip(selection.samples, parts, strict=True):
            sizes = self._sizes(i)
            ids, logprobs, *kept = part.split([BYTES_PER_NUMBER * size for size in sizes])
            samples[i] = dataclasses.replace(
                self._samples[i],
                token_ids=ids.view(torch.int32).long(),
                rollout_logprobs=logprobs.view(torch.float32).clone(),
                sampling_mask=SamplingMask(*(each.view(torch.int32).clone() for each in kept))
                if kept
                else None,
            )
        return samples


class RouteCargo:
    """Packs the routes of some layers."""

    def __init__(self, traces: Traces) -> None:
        self.traces = traces

    def num_bytes(self, sample: int, layers: tuple[int, ...]) -> int:
        return self.traces[sample].num_rows * self._row_bytes(sample, layers)

    def _row_bytes(self, sample: int, layers: tuple[int, ...]) -> int:
        trace = self.traces[sample]
        has_weights = trace.expert_weights is not None
        shape = (trace.layer_numbers, trace.num_experts, trace.expert_ids.shape[2], has_weights)
        return _width(layers, *shape)

    def pack(self, selection: Selection) -> Tensor:
        return to_rows(pack_joined([self.traces[i] for i in selection.samples], selection.layers))

    def unpack(self, selection: Selection, rows: Tensor) -> dict[int, PackedRoutes]:
        first = self.traces[selection.samples[0]]
        num_rows = [self.traces[i].num_rows for i in selection.samples]
        routes = from_rows(
            rows.view(sum(num_rows), self._row_bytes(selection.samples[0], selection.layers)),
            selection.layers,
            first.num_experts,
            first.expert_ids.shape[2],
            with_weights=first.expert_weights is not None,
        )
        return dict(zip(selection.samples, split_rows(routes, num_rows), strict=True))


class RolloutExchange:
    """Moves the rollouts of one run. Every method is a collective: call it on all ranks."""

    def __init__(
        self, mesh: Mesh, layers: Sequence[int] = (), *, share_memory: bool = True
    ) -> None:
        """`layers` are the MoE layers that this rank holds. Without `share_memory` everything is sent,
        as between nodes."""
        self._rank, self._world = mesh.rank, mesh.dims.world
        self._transport = Transport(mesh, (mesh.dp_rank, tuple(layers)), share_memory=share_memory)
        self.bytes_per_token = 0.0
        """Bytes of routes per token in the last `deliver`, over all ranks and layers: a rank with half
        the layers counts half a token. 0 where every rank had what it needs."""

    @property
    def num_bytes_shared(self) -> int:
        """The bytes that this rank put into its memory in the last exchange."""
        return self._transport.num_bytes_shared

    @property
    def num_bytes_sent(self) -> int:
        """The bytes that this rank sent in messages in the last exchange."""
        return self._transport.num_bytes_sent

    def deliver(
        self, samples: Sequence[Sample], shares: Sequence[Collection[int]]
    ) -> dict[int, PackedRoutes]:
        """Return the routes of this rank's samples in its layers: a `mrl.learn.batching.RouteSource`.

        Raises ValueError where the routes lack a layer.
        """
        traces = _traces(samples)
        of_dp = [tuple(sorted(i for i in share if i in traces)) for share in shares]
        needed = {
            rank: Selection(of_dp[dp_rank], layers)
            for rank, (dp_rank, layers) in enumerate(self._transport.coordinates)
        }
        held = self._held(traces)
        self.bytes_per_token = bytes_per_token(traces, needed, held)
        routes = _local_routes(traces, needed[self._rank])
        cargo = RouteCargo(traces)
        for selection, rows in self._transport.exchange(cargo, needed, held):
            routes |= cargo.unpack(selection, rows)
        return {i: routes[i] for i in needed[self._rank].samples}

    def deliver_tokens(
        self, samples: Sequence[Sample], shares: Sequence[Collection[int]]
    ) -> dict[int, Sample]:
        """Return this rank's samples, whole: a `mrl.learn.batching.TokenSource`."""
        of_dp = [tuple(sorted(share)) for share in shares]
        needed = {
            rank: Selection(of_dp[dp_rank], (TOKENS,))
            for rank, (dp_rank, _) in enumerate(self._transport.coordinates)
        }
        return self._tokens(samples, needed)

    def collect(self, groups: Sequence[SampleGroup], reader: int = 0) -> list[SampleGroup]:
        """Return the groups, whole on the rank `reader`."""
        return self.move(groups, [reader] * len(groups))

    def move(self, groups: Sequence[SampleGroup], readers: Sequence[int]) -> list[SampleGroup]:
        """Return the groups, each of them whole on its reader and on the ranks that held it."""
        samples = [sample for group in groups for sample in group.samples]
        traces = _traces(samples)
        to = [r for group, r in zip(groups, readers, strict=True) for _ in group.samples]
        if self._world == 1 or not samples:
            return list(groups)
        indices = {rank: [i for i, r in enumerate(to) if r == rank] for rank in set(to)}
        needed = {rank: Selection(tuple(those), (TOKENS,)) for rank, those in indices.items()}
        for i, sample in self._tokens(samples, needed).items():
            samples[i] = sample
        layers = next(iter(traces.values())).layer_numbers if traces else ()
        for rank, those in indices.items():
            needed[rank] = Selection(tuple(i for i in those if i in traces), layers)
        cargo = RouteCargo(traces)
        for selection, rows in self._transport.exchange(cargo, needed, self._held(traces)):
            for i, routes in cargo.unpack(selection, rows).items():
                trace = unpack_trace(routes, traces[i])
                samples[i] = dataclasses.replace(samples[i], routing=trace)
        remaining = iter(samples)
        return [
            dataclasses.replace(g, samples=[next(remaining) for _ in g.samples]) for g in groups
        ]

    def _tokens(
        self, samples: Sequence[Sample], needed: Mapping[int, Selection]
    ) -> dict[int, Sample]:
        """Return the samples that this rank needs, by index."""
        here = [i for i, sample in enumerate(samples) if sample.is_held]
        cargo = TokenCargo(samples)
        mine = needed.get(self._rank, Selection((), ())).samples
        tokens = {i: samples[i] for i in mine if samples[i].is_held}
        held = self._transport.share_held(here)
        for selection, rows in self._transport.exchange(cargo, needed, held):
            tokens |= cargo.unpack(selection, rows)
        return {i: tokens[i] for i in mine}

    def _held(self, traces: Traces) -> list[list[int]]:
        """Return, by rank, the samples whose routes it has."""
        here = [i for i, trace in traces.items() if not trace.expert_ids.is_meta]
        return self._transport.share_held(here)


def bytes_per_token(
    traces: Traces, needed: Mapping[int, Selection], held: Sequence[Collection[int]]
) -> float:
    """Return the bytes of routes that the ranks get, divided by the tokens that they belong to; a rank
    with a share of the layers counts that share of a token."""
    cargo, num_bytes, num_tokens = RouteCargo(traces), 0, 0.0

    @cache
    def total(selection: Selection) -> tuple[int, int]:
        """(bytes, rows); ranks of one data-parallel rank and one stage select the same."""
        return of(selection.samples, selection.layers)

    def of(indices: Collection[int], layers: tuple[int, ...]) -> tuple[int, int]:
        rows = sum(traces[i].num_rows for i in indices)
        return sum(cargo.num_bytes(i, layers) for i in indices), rows

    for rank, selection in needed.items():
        if not selection.layers or not selection.samples:
            continue
        local = of(frozenset(selection.samples) & frozenset(held[rank]), selection.layers)
        size, rows = (all_ - here for all_, here in zip(total(selection), local, strict=True))
        share = len(selection.layers) / len(traces[selection.samples[0]].layer_numbers)
        num_bytes += size
        num_tokens += rows * share
    return num_bytes / num_tokens if num_tokens else 0.0


def _local_routes(traces: Traces, selection: Selection) -> dict[int, PackedRoutes]:
    """Return what never travels: samples that this rank holds, and selections of no layer."""
    here = [i for i in selection.samples if not traces[i].expert_ids.is_meta]
    routes = dict(zip(here, pack_traces([traces[i] for i in here], selection.layers), strict=True))
    for i in () if selection.layers else selection.samples:
        trace = traces[i]
        empty = torch.empty((trace.num_rows, 0), dtype=torch.uint8)
        routes[i] = from_rows(empty, (), trace.num_experts, trace.expert_ids.shape[2])
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
    """Return the bytes of a row. Raises ValueError where the routes lack one of the layers."""
    places_of(of_model, layers)
    return row_bytes(len(layers), num_experts, topk, with_weights=with_weights)
