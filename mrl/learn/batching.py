"""Pack this rank's share of a step's samples into the micro-batches of each optimizer step.

Every rank decides in the same way which rank trains which sample, and then fetches the tokens and
routes of its own samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moe.align import routes_of_traces, with_native_rows
from moe.provenance import without_stale_tokens
from mrl.algorithms.base import SequenceWeights
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.learn.advantages import with_advantages
from mrl.learn.packs import Packs, agreed_packs, shared_packs, unshared_packs
from mrl.shared_prefixes import SharedPrefixes
from mrl.types import Sample, TokenRoutes, TrainBatch
from parallel.dims import round_up
from parallel.mesh import Mesh
from parallel.packing import WeightedSample, assign_micro_batches, pack
from parallel.prefix_packing import plan_shares

_PUBLISHED = AlgorithmConfig()
PerPrompt = TypeVar("PerPrompt")


def split_evenly(groups: Sequence[PerPrompt], parts: int) -> list[list[PerPrompt]]:
    """Split a list with one item per prompt into `parts` consecutive mini-batches of equal size.

    Raises InputError if the number of prompts is 0 or not a multiple of `parts`.
    """
    size, remaining = divmod(len(groups), parts)
    if remaining or not size:
        raise InputError(
            f"train.num_steps_per_rollout: {len(groups)} prompts do not divide into {parts} "
            f"mini-batches ({len(groups)} = {size} x {parts} + {remaining})"
        )
    return [list(groups[i * size : (i + 1) * size]) for i in range(parts)]


RouteSource = Callable[[Sequence[Sample], Sequence[Collection[int]]], Mapping[int, TokenRoutes]]
"""A function that returns the routes of this rank's samples in this rank's layers, by sample
number. Samples without routes are left out. The arguments are the samples of a step and, for each
data-parallel rank, the numbers of the samples that it trains. A sample's number is its index in the
step."""


TokenSource = Callable[[Sequence[Sample], Sequence[Collection[int]]], Mapping[int, Sample]]
"""A function that takes the same arguments as a `RouteSource`, and returns this rank's samples with
their tokens, by sample number (the index in the step)."""


def held_tokens(samples: Sequence[Sample], shares: Sequence[Collection[int]]) -> dict[int, Sample]:
    """Return a dict of all samples by their index. A `TokenSource` for ranks that hold all tokens."""
    return dict(enumerate(samples))


def held_routes(
    samples: Sequence[Sample], shares: Sequence[Collection[int]]
) -> dict[int, TokenRoutes]:
    """Return the routes of all samples in `shares`, in all layers; {} if no sample has routes.

    A `RouteSource` for ranks that hold the routes of every sample and have all layers.
    """
    numbers = sorted(i for share in shares for i in share)
    traces = {i: trace for i in numbers if (trace := samples[i].routing) is not None}
    if not traces:
        return {}
    layers = next(iter(traces.values())).layer_numbers
    return dict(zip(traces, routes_of_traces(list(traces.values()), layers), strict=True))


def make_train_batches(
    parts: Sequence[tuple[Sequence[Sample], Sequence[float]]],
    algorithm: SequenceWeights,
    mesh: Mesh,
    micro_batch_tokens: int,
    routes: RouteSource | None = held_routes,
    tokens: TokenSource = held_tokens,
    *,
    stale: Sequence[Tensor | None] = (),
    config: AlgorithmConfig = _PUBLISHED,
    max_response_len: int = 0,
    version: int | None = None,
    share_prefixes: bool = False,
) -> list[TrainBatch]:
    """Pack this rank's share of each mini-batch of a step.

    parts: for each mini-batch, the samples of all ranks and their shaped rewards. Samples that
    other ranks train need only their lengths and loss masks. routes: the function that fetches the
    routes to replay or compare; None without routes. tokens: the function that fetches the tokens
    of this rank's samples. If one of these functions communicates, this call is a collective.
    stale: bool[T-1] for each sample of the step, true for route rows that are not replayed (see
    `moe.provenance`); the caller must already have removed the tokens predicted from these rows
    from the loss. config,
    max_response_len: arguments of `algorithm.sequence_weights`. version: the version of the weights
    before the update. share_prefixes: whether samples of one prompt may share the rows of their
    common prefix, so that these rows are computed only once. They are shared in every mini-batch in
    which this saves enough rows (`parallel.prefix_packing`). If `share_prefixes` is true, this call
    is a collective.

    The micro-batches have no advantages; `mrl.learn.advantages` adds them. If the layout requires
    micro-batches of equal length, the micro-batches of all mini-batches get the same length,
    because one pass may run them together.
    """
    dims = mesh.dims
    of_parts = [samples for samples, _ in parts]
    plans = [
        plan_shares(samples, dims, micro_batch_tokens) if share_prefixes else None
        for samples in of_parts
    ]
    assignments = [
        _assign(samples, mesh, micro_batch_tokens) if plan is None else [[own] for own in plan]
        for samples, plan in zip(of_parts, plans, strict=True)
    ]
    fetched = _fetch_routes(of_parts, assignments, routes, stale)
    whole = _fetch_tokens(of_parts, assignments, mesh.dp_rank, tokens)
    packs: list[Packs] = [
        unshared_packs(samples, shares, mesh)
        if plan is None
        else shared_packs(samples, own_routes, plan[mesh.dp_rank], mesh, micro_batch_tokens)
        for samples, plan, shares, own_routes in zip(
            whole, plans, assignments, fetched, strict=True
        )
    ]
    if any(plan is not None for plan in plans):
        packs = agreed_packs(packs, mesh)
    longest = max(each.longest for each in packs)
    return [
        _pack_share(
            samples,
            rewards,
            partial(_weights, algorithm, config, max_response_len),
            mesh,
            own.micro_batches,
            own_routes,
            first_id,
            min_rows=longest if dims.equal_micro_batches else 1,
            version=version,
            credits_turns=config.turn_rewards,
        )
        for samples, (_, rewards), own, own_routes, first_id in zip(
            whole, parts, packs, fetched, _first_ids(of_parts), strict=True
        )
    ]


def make_train_batch(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    algorithm: SequenceWeights,
    mesh: Mesh,
    micro_batch_tokens: int,
    config: AlgorithmConfig = _PUBLISHED,
    *,
    share_prefixes: bool = False,
) -> TrainBatch:
    """Pack this rank's share of the samples of one optimizer step, with given advantages.

    samples: the samples of all ranks, with tokens and routes. advantages: one number per sample,
    which also serves as the sample's reward. Stale route rows are not replayed, and the tokens
    predicted from these rows are removed from the loss.
    """
    kept, stale = without_stale_tokens(samples)
    (batch,) = make_train_batches(
        [(kept, advantages)], algorithm, mesh, micro_batch_tokens, stale=stale, config=config,
        share_prefixes=share_prefixes,
    )  # fmt: skip
    filled = with_advantages(batch.micro_batches, torch.tensor(advantages, dtype=torch.float32))
    return dataclasses.replace(batch, micro_batches=filled)


def _fetch_routes(
    parts: Sequence[Sequence[Sample]],
    assignments: Sequence[list[list[list[int]]]],
    source: RouteSource | None,
    stale: Sequence[Tensor | None],
) -> list[dict[int, TokenRoutes]]:
    """Fetch the routes of all mini-batches with one call of `source`.

    Stale rows (`moe.provenance`) lose their captured routes; the trainer's router then chooses their
    experts. Returns the routes of each mini-batch, by the index of the sample in its mini-batch.
    """
    if source is None:
        return [{} for _ in parts]
    samples = [sample for part in parts for sample in part]
    firsts = _first_ids(parts)
    routes = dict(source(samples, _shares(parts, assignments)))
    for i, rows in enumerate(stale):
        if rows is not None and i in routes:
            routes[i] = with_native_rows(routes[i], rows)
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
    """Fetch the tokens of this rank's samples with one call of `source`.

    Returns all samples of each mini-batch. The samples that other ranks train are unchanged.
    """
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
    """Return, for each data-parallel rank, the numbers of the samples that the rank trains.

    A sample's number is its index in the step.
    """
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
    """Return, for each mini-batch, the index of its first sample among all samples of the step."""
    sizes = [len(part) for part in parts]
    return [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _assign(
    samples: Sequence[Sample], mesh: Mesh, micro_batch_tokens: int
) -> list[list[list[int]]]:
    """Assign the samples of a mini-batch to ranks and micro-batches.

    Returns, for each data-parallel rank, a list of its micro-batches. A micro-batch is a list of
    indices into `samples`.
    """
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
    share: Sequence[tuple[list[int], SharedPrefixes | None]],
    routes: Mapping[int, TokenRoutes],
    first_id: int,
    min_rows: int,
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
            min_rows=min_rows,
            version=version,
            shared=shared,
        )
        for members, shared in share
    ]
    return TrainBatch(micro_batches, weights.num_loss_tokens, weights.num_samples)


class _Weights(NamedTuple):
    """The loss weights of an optimizer step's samples, and the counts that normalise them."""

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
