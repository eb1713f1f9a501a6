"""This module makes a rank's batches from scored groups: mini-batches, weights, routes, packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from moe.align import pack_traces, with_native_rows
from moe.provenance import stale_rows, without_stale_tokens
from mrl.algorithms.base import SequenceWeights
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.learn.advantages import with_advantages
from mrl.types import PackedRoutes, Sample, SampleGroup, TrainBatch
from parallel.mesh import Mesh
from parallel.packing import WeightedSample, assign_micro_batches, pack, round_up

_PUBLISHED = AlgorithmConfig()


def split_evenly(groups: Sequence[SampleGroup], parts: int) -> list[list[SampleGroup]]:
    """Split consecutive groups into `parts` mini-batches of the same number of prompts.

    Raises InputError, with the arithmetic, where they do not divide: nothing is dropped.
    """
    size, remaining = divmod(len(groups), parts)
    if remaining or not size:
        raise InputError(
            f"train.num_steps_per_rollout: {len(groups)} prompts do not divide into {parts} "
            f"mini-batches ({len(groups)} = {size} x {parts} + {remaining})"
        )
    return [list(groups[i * size : (i + 1) * size]) for i in range(parts)]


RouteSource = Callable[[Sequence[Sample], Sequence[Collection[int]]], Mapping[int, PackedRoutes]]
"""(samples of a step, numbers of those that each data-parallel rank trains) -> by the number of a
sample of this rank, the routes of this rank's layers. Samples without routes are left out."""


TokenSource = Callable[[Sequence[Sample], Sequence[Collection[int]]], Mapping[int, Sample]]
"""A `RouteSource` for tokens: by their numbers, the samples of this rank with all their tokens."""


def held_tokens(samples: Sequence[Sample], shares: Sequence[Collection[int]]) -> dict[int, Sample]:
    """Serve as the TokenSource where every rank holds all samples."""
    return dict(enumerate(samples))


def held_routes(
    samples: Sequence[Sample], shares: Sequence[Collection[int]]
) -> dict[int, PackedRoutes]:
    """Serve as the RouteSource where every rank holds all samples whole, or none has routes.

    The routes are those of all layers.
    """
    numbers = sorted(i for share in shares for i in share)
    traces = {i: trace for i in numbers if (trace := samples[i].routing) is not None}
    if not traces:
        return {}
    layers = next(iter(traces.values())).layer_numbers
    return dict(zip(traces, pack_traces(list(traces.values()), layers), strict=True))


def make_train_batches(
    parts: Sequence[tuple[Sequence[Sample], Sequence[float]]],
    algorithm: SequenceWeights,
    mesh: Mesh,
    micro_batch_tokens: int,
    routes: RouteSource | None = held_routes,
    tokens: TokenSource = held_tokens,
    *,
    drops_stale: bool = True,
    config: AlgorithmConfig = _PUBLISHED,
    max_response_len: int = 0,
    version: int | None = None,
) -> list[TrainBatch]:
    """Pack this rank's share of each mini-batch (samples, shaped rewards) of a step.

    Advantages are None: `mrl.learn.advantages` computes them from what is packed here.

    `config`, `max_response_len`: what `algorithm.sequence_weights` wants to know of the recipe.
    `version`: of the weights before the update.

    `routes`: where those to be replayed or compared come from; None for neither. Rows that other
    weights chose than their tokens were sampled with are not among them, and their tokens leave the
    loss if `drops_stale`: a replay would have to do without those rows.

    `tokens`: where the tokens of this rank's samples come from; of the others their lengths and loss
    masks are enough.

    Micro-batches may run in one pass whatever mini-batch they belong to, so where they have to be of
    one length, they all are.
    """
    dims = mesh.dims
    assignments = [_assign(samples, mesh, micro_batch_tokens) for samples, _ in parts]
    longest = max(
        sum(round_up(len(samples[i].token_ids), dims.sequence_multiple) for i in members)
        for (samples, _), shares in zip(parts, assignments, strict=True)
        for share in shares
        for members in share
    )
    drops = drops_stale and routes is not None
    of_parts = [samples for samples, _ in parts]
    fetched = _fetch_routes(of_parts, assignments, routes)
    whole = _fetch_tokens(of_parts, assignments, mesh.dp_rank, tokens)
    return [
        _pack_share(
            [without_stale_tokens(sample) for sample in samples] if drops else samples,
            rewards,
            partial(_weights, algorithm, config, max_response_len),
            mesh,
            shares[mesh.dp_rank],
            own_routes,
            first_id,
            min_tokens=longest if dims.equal_micro_batches else 1,
            version=version,
            credits_turns=config.turn_rewards,
        )
        for samples, (_, rewards), shares, own_routes, first_id in zip(
            whole, parts, assignments, fetched, _first_ids(of_parts), strict=True
        )
    ]


def make_train_batch(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    algorithm: SequenceWeights,
    mesh: Mesh,
    micro_batch_tokens: int,
    config: AlgorithmConfig = _PUBLISHED,
) -> TrainBatch:
    """Pack this rank's share of one optimizer step over `samples` of all ranks with given advantages.

    They stand in for the rewards, too. Every rank assigns the samples alike, so the normalisers are
    global before anything is split.
    """
    parts = [(samples, advantages)]
    (batch,) = make_train_batches(parts, algorithm, mesh, micro_batch_tokens, config=config)
    filled = with_advantages(batch.micro_batches, torch.tensor(advantages, dtype=torch.float32))
    return dataclasses.replace(batch, micro_batches=filled)


def _fetch_routes(
    parts: Sequence[Sequence[Sample]],
    assignments: Sequence[list[list[list[int]]]],
    source: RouteSource | None,
) -> list[dict[int, PackedRoutes]]:
    """Fetch the routes of every mini-batch, by sample, in one exchange; stale rows are native."""
    if source is None:
        return [{} for _ in parts]
    samples = [sample for part in parts for sample in part]
    firsts = _first_ids(parts)
    routes = dict(source(samples, _shares(parts, assignments)))
    for i, own in routes.items():
        stale = stale_rows(samples[i])
        if stale is not None:
            routes[i] = with_native_rows(own, stale)
    return [
        {i - first: routes[i] for i in range(first, first + len(part)) if i in routes}
        for first, part in zip(firsts, parts, strict=True)
    ]


def _fetch_tokens(
    parts: Sequence[Sequence[Sample]],
    assignments: Sequence[list[list[list[int]]]],
    dp_rank: int,
    source: TokenSource,
) -> list[list[Sample]]:
    """The mini-batches with this rank's own samples whole, in one exchange."""
    samples = [sample for part in parts for sample in part]
    shares = _shares(parts, assignments)
    whole = source(samples, shares)
    for i in shares[dp_rank]:
        samples[i] = whole[i]
    firsts = _first_ids(parts)
    return [samples[i : i + len(part)] for i, part in zip(firsts, parts, strict=True)]


def _shares(
    parts: Sequence[Sequence[Any]], assignments: Sequence[list[list[list[int]]]]
) -> list[set[int]]:
    """Return by data-parallel rank the numbers in the step of the samples that it trains."""
    firsts = _first_ids(parts)
    return [
        {
            first + i
            for first, own in zip(firsts, assignments, strict=True)
            for m in own[dp]
            for i in m
        }
        for dp in range(len(assignments[0]))
    ]


def _first_ids(parts: Sequence[Sequence[Any]]) -> list[int]:
    """The number in the step of each mini-batch's first sample."""
    sizes = [len(part) for part in parts]
    return [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _assign(
    samples: Sequence[Sample], mesh: Mesh, micro_batch_tokens: int
) -> list[list[list[int]]]:
    dims = mesh.dims
    return assign_micro_batches(
        [round_up(len(s.token_ids), dims.sequence_multiple) for s in samples],
        dims.dp,
        micro_batch_tokens,
        multiple_of=dims.pp if dims.vpp > 1 else 1,
    )


def _pack_share(
    samples: Sequence[Sample],
    rewards: Sequence[float],
    weights_of: Callable[[Sequence[Sample], Sequence[float]], _Weights],
    mesh: Mesh,
    share: list[list[int]],
    routes: Mapping[int, PackedRoutes],
    first_id: int,
    min_tokens: int,
    version: int | None,
    credits_turns: bool,
) -> TrainBatch:
    weights = weights_of(samples, rewards)
    weighted = [
        WeightedSample(
            sample, None, weight, first_id + i, nll_weight, routes.get(i), reward, credits_turns
        )
        for i, (sample, reward, weight, nll_weight) in enumerate(
            zip(samples, rewards, weights.loss, weights.nll, strict=True)
        )
    ]
    micro_batches = [
        pack(
            [weighted[i] for i in members],
            mesh.dims.token_multiple,
            sequence_multiple=mesh.dims.sequence_multiple,
            min_tokens=min_tokens,
            version=version,
        )
        for members in share
    ]
    return TrainBatch(micro_batches, weights.num_loss_tokens, weights.num_samples)


class _Weights(NamedTuple):
    """The loss weights of an optimizer step's samples, and the counts that they were divided by."""

    loss: list[float]
    nll: Sequence[float | None]
    num_loss_tokens: int
    num_samples: int


def _weights(
    algorithm: SequenceWeights,
    config: AlgorithmConfig,
    max_response_len: int,
    samples: Sequence[Sample],
    rewards: Sequence[float],
) -> _Weights:
    counts = torch.stack([s.loss_mask.sum() for s in samples])
    num_tokens, num_samples = int(counts.sum()), int((counts > 0).sum())
    weights = algorithm.sequence_weights(counts, num_tokens, num_samples, config, max_response_len)
    nll: Sequence[float | None] = [None] * len(samples)
    if (nll_weights := getattr(algorithm, "nll_weights", None)) is not None:
        nll = nll_weights(counts, torch.tensor(rewards), config).tolist()
    return _Weights(weights.tolist(), nll, num_tokens, num_samples)
