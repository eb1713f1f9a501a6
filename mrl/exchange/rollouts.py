"""Brings rollouts from the ranks that generated them to the ranks that train on them.

Each rank gets the tokens of the samples that it trains on, and their routes in its own layers. All
ranks know the outlines of all samples, which have the shapes of tokens and routes but not the
contents (`mrl.run.rollouts.outline`). From these, all ranks compute the same assignment of samples
to ranks without asking each other. `mrl.exchange.transport` moves the bytes. Routes are sent as rows
of bytes (`moe.route_rows`). A token is sent as 8 bytes: its id and its log-prob. If the sample has a
sampling mask, a token also takes 4 bytes for the number of kept tokens, and 4 bytes for the id of
each kept token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from moe.align import joined_routes, places_of, routes_of_traces, split_rows
from moe.route_rows import from_rows, row_bytes, to_rows
from moe.trace import with_routes
from mrl.exchange.transfers import TOKENS, Selection
from mrl.exchange.transport import Transport
from mrl.sampling_mask import SamplingMask
from mrl.types import RoutingTrace, Sample, SampleGroup, TokenRoutes
from parallel.mesh import Mesh

Traces = Mapping[int, RoutingTrace]
"""Routing traces by the index of the sample in the step's list of samples. If only other ranks hold
a sample's routes, its trace has shapes but no expert ids."""
BYTES_PER_NUMBER = 4
"""The size in bytes of a token id or a count (i32), and of a log-prob (f32)."""


class TokenPayload:
    """Encodes the tokens of samples for transfers between ranks (a
    `mrl.exchange.transfers.Payload`). A sample is sent as all of its token ids, then all of its
    log-probs, then its sampling mask if it has one."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def num_bytes(self, sample: int, layers: tuple[int, ...]) -> int:
        return BYTES_PER_NUMBER * sum(map(len, self._tensors(sample)))

    def _tensors(self, sample: int) -> list[Tensor]:
        """Return the sample's token ids and log-probs and, if it has a mask, the ids and counts of
        the kept tokens. If another rank holds the sample, these tensors have shapes but no
        contents."""
        tokens, mask = self._samples[sample], self._samples[sample].sampling_mask
        tensors = [tokens.token_ids, tokens.rollout_logprobs]
        return tensors if mask is None else [*tensors, mask.token_ids, mask.counts]

    def pack(self, selection: Selection) -> Tensor:
        parts = []
        for i in selection.samples:
            ids, *others = self._tensors(i)
            tensors = [ids.to(torch.int32), *others]
            parts += [tensor.contiguous().view(torch.uint8) for tensor in tensors]
        return torch.cat(parts)

    def unpack(self, selection: Selection, rows: Tensor) -> dict[int, Sample]:
        """Return the selected samples by index, with tokens, log-probs and masks from the bytes
        `rows`."""
        parts = rows.split([self.num_bytes(i, selection.layers) for i in selection.samples])
        samples = {}
        for i, part in zip(selection.samples, parts, strict=True):
            sizes = [BYTES_PER_NUMBER * len(tensor) for tensor in self._tensors(i)]
            ids, logprobs, *kept = part.split(sizes)
            samples[i] = dataclasses.replace(
                self._samples[i],
                token_ids=ids.view(torch.int32).long(),
                rollout_logprobs=logprobs.view(torch.float32).clone(),
                sampling_mask=SamplingMask(*(each.view(torch.int32).clone() for each in kept))
                if kept
                else None,
            )
        return samples


class RoutePayload:
    """Encodes the routes of samples in some layers for transfers between ranks (a
    `mrl.exchange.transfers.Payload`)."""

    def __init__(self, traces: Traces) -> None:
        self.traces = traces
        self._widths: dict[tuple[int, ...], int] = {}
        """A cache: maps layers to the number of bytes that one token's routes in these layers take,
        which is the same for all traces."""

    def num_bytes(self, sample: int, layers: tuple[int, ...]) -> int:
        return self.traces[sample].num_rows * self._row_bytes(layers)

    def _row_bytes(self, layers: tuple[int, ...]) -> int:
        """Return the number of bytes of a row (one token in all of `layers`). Raises ValueError if
        the routes lack one of the layers."""
        if layers not in self._widths:
            first = next(iter(self.traces.values()))
            num_experts, topk = first.num_experts, first.expert_ids.shape[2]
            places_of(first.layer_numbers, layers)
            has_weights = first.expert_weights is not None
            self._widths[layers] = row_bytes(
                len(layers), num_experts, topk, with_weights=has_weights
            )
        return self._widths[layers]

    def pack(self, selection: Selection) -> Tensor:
        return to_rows(joined_routes([self.traces[i] for i in selection.samples], selection.layers))

    def unpack(self, selection: Selection, rows: Tensor) -> dict[int, TokenRoutes]:
        first = self.traces[selection.samples[0]]
        num_rows = [self.traces[i].num_rows for i in selection.samples]
        routes = from_rows(
            rows.view(sum(num_rows), self._row_bytes(selection.layers)),
            selection.layers,
            first.num_experts,
            first.expert_ids.shape[2],
            with_weights=first.expert_weights is not None,
        )
        return dict(zip(selection.samples, split_rows(routes, num_rows), strict=True))


class RolloutExchange:
    """The exchange of rollouts between ranks. Every public method is a collective of all ranks."""

    def __init__(
        self, mesh: Mesh, layers: Sequence[int] = (), *, share_memory: bool = True
    ) -> None:
        """`layers` are the MoE layers that this rank holds. Without `share_memory`, everything is
        sent in messages, as between nodes."""
        self._rank, self._world = mesh.rank, mesh.dims.world
        self.transport = Transport(mesh, (mesh.dp_rank, tuple(layers)), share_memory=share_memory)
        self.bytes_per_token = 0.0
        """Bytes of routes that ranks received in the last `deliver`, per received token. A token counts
        half for a rank with half of the layers. 0 if no rank received routes."""

    def deliver(
        self, samples: Sequence[Sample], shares: Sequence[Collection[int]]
    ) -> dict[int, TokenRoutes]:
        """Return the routes of the samples on which this rank trains, by sample index.

        The routes cover only this rank's layers, and samples without routes are left out. `shares`
        has, for each data-parallel rank, the indices of the samples on which it trains. Raises
        ValueError if the routes lack one of the layers. The method can be used as a
        `mrl.learn.batching.RouteSource`.
        """
        traces = _traces(samples)
        of_dp = [tuple(sorted(i for i in share if i in traces)) for share in shares]
        needed = {
            rank: Selection(of_dp[dp_rank], layers)
            for rank, (dp_rank, layers) in enumerate(self.transport.coordinates)
        }
        held = self._held(traces)
        self.bytes_per_token = bytes_per_token(traces, needed, held)
        routes = _local_routes(traces, needed[self._rank])
        payload = RoutePayload(traces)
        for selection, rows in self.transport.exchange(payload, needed, held):
            routes |= payload.unpack(selection, rows)
        return {i: routes[i] for i in needed[self._rank].samples}

    def deliver_tokens(
        self, samples: Sequence[Sample], shares: Sequence[Collection[int]]
    ) -> dict[int, Sample]:
        """Return the samples on which this rank trains, with their tokens, by index. `shares` has,
        for each data-parallel rank, the indices of the samples on which it trains. The method can be
        used as a `mrl.learn.batching.TokenSource`."""
        of_dp = [tuple(sorted(share)) for share in shares]
        needed = {
            rank: Selection(of_dp[dp_rank], (TOKENS,))
            for rank, (dp_rank, _) in enumerate(self.transport.coordinates)
        }
        return self._tokens(samples, needed)

    def collect(self, groups: Sequence[SampleGroup], reader: int = 0) -> list[SampleGroup]:
        """Return the groups. On the rank `reader` they have all of their tokens and routes."""
        return self.move(groups, [reader] * len(groups))

    def move(self, groups: Sequence[SampleGroup], readers: Sequence[int]) -> list[SampleGroup]:
        """Return the groups. Group i has all of its tokens and routes on the rank `readers[i]`.
        Ranks that held tokens or routes before keep them."""
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
        payload = RoutePayload(traces)
        for selection, rows in self.transport.exchange(payload, needed, self._held(traces)):
            for i, routes in payload.unpack(selection, rows).items():
                trace = with_routes(traces[i], routes)
                samples[i] = dataclasses.replace(samples[i], routing=trace)
        remaining = iter(samples)
        return [
            dataclasses.replace(g, samples=[next(remaining) for _ in g.samples]) for g in groups
        ]

    def _tokens(
        self, samples: Sequence[Sample], needed: Mapping[int, Selection]
    ) -> dict[int, Sample]:
        """Return the samples that this rank needs, with their tokens, by index."""
        here = [i for i, sample in enumerate(samples) if sample.is_held]
        payload = TokenPayload(samples)
        mine = needed.get(self._rank, Selection((), ())).samples
        tokens = {i: samples[i] for i in mine if samples[i].is_held}
        held = self.transport.share_held(here)
        for selection, rows in self.transport.exchange(payload, needed, held):
            tokens |= payload.unpack(selection, rows)
        return {i: tokens[i] for i in mine}

    def _held(self, traces: Traces) -> list[list[int]]:
        """Return for each rank the indices of the samples whose routes it holds."""
        here = [i for i, trace in traces.items() if not trace.expert_ids.is_meta]
        return self.transport.share_held(here)


def bytes_per_token(
    traces: Traces, needed: Mapping[int, Selection], held: Sequence[Collection[int]]
) -> float:
    """Return the bytes of routes that ranks receive, per received token. For a rank that needs a
    fraction of the layers, a token counts as that fraction."""
    payload, num_bytes, num_tokens = RoutePayload(traces), 0, 0.0

    @cache
    def size_of(selection: Selection) -> tuple[int, int]:
        """Return (number of bytes, number of rows) of the routes in a selection. Cached, because all
        ranks with the same data-parallel rank and pipeline stage have the same selection."""
        rows = sum(traces[i].num_rows for i in selection.samples)
        return sum(payload.num_bytes(i, selection.layers) for i in selection.samples), rows

    for rank, selection in needed.items():
        if not selection.layers or not selection.samples:
            continue
        here = frozenset(selection.samples) & frozenset(held[rank])
        size, rows = size_of(selection)
        local_size, local_rows = size_of(Selection(tuple(here), selection.layers))
        share = len(selection.layers) / len(traces[selection.samples[0]].layer_numbers)
        num_bytes += size - local_size
        num_tokens += (rows - local_rows) * share
    return num_bytes / num_tokens if num_tokens else 0.0


def _local_routes(traces: Traces, selection: Selection) -> dict[int, TokenRoutes]:
    """Return, by sample index, the routes that this rank gets without a transfer: the routes of the
    selected samples that the rank holds. If no layer is selected, return empty routes for all
    selected samples."""
    here = [i for i in selection.samples if not traces[i].expert_ids.is_meta]
    routes = dict(
        zip(here, routes_of_traces([traces[i] for i in here], selection.layers), strict=True)
    )
    for i in () if selection.layers else selection.samples:
        trace = traces[i]
        empty = torch.empty((trace.num_rows, 0), dtype=torch.uint8)
        routes[i] = from_rows(empty, (), trace.num_experts, trace.expert_ids.shape[2])
    return routes


def _traces(samples: Sequence[Sample]) -> dict[int, RoutingTrace]:
    return {i: s.routing for i, s in enumerate(samples) if s.routing is not None}
