"""Routes between ranks: each gets what it trains, bit for bit, through memory and through messages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.align import routes_of_trace
from mrl.config import ParallelConfig
from mrl.exchange.rollouts import RolloutExchange
from mrl.exchange.transfers import Selection, Transfer, Transfers, compute_transfers
from mrl.exchange.transport import nodes_of
from mrl.run.rollouts import is_held, outline
from mrl.sampling_mask import SamplingMask
from mrl.types import Prompt, RoutingTrace, Sample, SampleGroup, TokenRoutes, VersionSpan
from parallel.dims import ParallelDims
from parallel.mesh import init_mesh, world_size
from tests.ranks import run_ranks

NUM_LAYERS, EXPERTS, TOPK = 4, 8, 2


def make_group(number: int, lengths: list[int], with_weights: bool) -> SampleGroup:
    """A sample without routes where the length is 0."""
    samples = []
    for i, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(100 * number + i)
        weights = torch.rand(max(length, 4) - 1, NUM_LAYERS, EXPERTS, generator=generator)
        ids = weights.topk(TOPK).indices.to(torch.uint8)
        spans = (VersionSpan(0, 0, len(ids)),)
        sample = Sample(
            group_id=number,
            token_ids=torch.arange(len(ids) + 1),
            prompt_len=2,
            loss_mask=torch.arange(len(ids) + 1) >= 2,
            rollout_logprobs=torch.zeros(len(ids) + 1),
            weight_versions=(VersionSpan(0, 2, len(ids) + 1),),
            finish_reason="stop",
            routing=RoutingTrace(
                expert_ids=ids,
                layer_numbers=(1, 2, 3, 4),
                num_experts=EXPERTS,
                row_versions=spans,
                num_cached_rows=0,
                expert_weights=weights.gather(2, ids.long()) if with_weights else None,
            )
            if length
            else None,
            sampling_mask=SamplingMask.of([[], [], *[[7, t, 9] for t in range(2, len(ids) + 1)]])
            if number == 0
            else None,
        )
        samples.append(sample)
    return SampleGroup(Prompt(str(number), torch.arange(2), "x", {}, "f:1"), samples)


def make_groups(with_weights: bool) -> list[SampleGroup]:
    lengths = [[9, 4], [30, 0], [2000], [5]]
    return [make_group(i, of_group, with_weights) for i, of_group in enumerate(lengths)]


SHARES = [{0, 2, 5}, {1, 3, 4}]
"""What each data-parallel rank trains of the six samples; sample 3 has no routes."""
STAGES = {1: [(1, 2, 3, 4)], 2: [(1,), (2, 3, 4)], 3: [(1, 2, 3, 4), ()]}
"""Layers by stage; in the third case the second stage has none."""


def exchange(sizes: dict[str, Any], stages: int, with_weights: bool) -> list[dict[str, Any]]:
    """Returns whether a rank got just what it should have, through memory and through messages."""
    dims = ParallelDims.create(ParallelConfig(**sizes), world_size())
    mesh = init_mesh(dims, 0)
    layers = STAGES[stages][mesh.pp_rank]
    whole = make_groups(with_weights)
    mine = [
        group if i % dims.world == mesh.rank else outline(group) for i, group in enumerate(whole)
    ]
    samples = [sample for group in mine for sample in group.samples]
    full = [sample for group in whole for sample in group.samples]
    shares = SHARES if dims.dp == 2 else [set(range(6))]
    expected = {
        i: routes_of_trace(trace, layers)
        for i in shares[mesh.dp_rank]
        if (trace := full[i].routing) is not None
    }
    results = []
    for share_memory in (True, False):
        wire = RolloutExchange(mesh, layers, share_memory=share_memory)
        deliveries, moved = [], []
        for _ in range(2):  # the memory is used again
            deliveries.append(wire.deliver(samples, shares))
            moved.append((wire.transport.num_bytes_shared, wire.transport.num_bytes_sent))
        result = {
            "right": all(_same(delivered, expected) for delivered in deliveries),
            "bytes": wire.bytes_per_token,
            "moved": moved,
            "left": wire.transport._memory.num_bytes,
        }
        collected = [sample for group in wire.collect(mine) for sample in group.samples]
        is_whole = all(_same_routes(a, b) for a, b in zip(collected, full, strict=True))
        results.append(result | {"whole": is_whole})
    return results


def _same(delivered: dict[int, TokenRoutes], expected: dict[int, TokenRoutes]) -> bool:
    return delivered.keys() == expected.keys() and all(
        routes.layer_numbers == expected[i].layer_numbers
        and torch.equal(routes.expert_ids, expected[i].expert_ids)
        and torch.equal(routes.captured, expected[i].captured)
        and _same_weights(routes.weights, expected[i].weights)
        for i, routes in delivered.items()
    )


def _same_weights(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or not a.numel():
        return (a is None or not a.numel()) and (b is None or not b.numel())
    return torch.equal(a, b)


def _same_routes(a: Sample, b: Sample) -> bool:
    if a.routing is None or b.routing is None:
        return a.routing is b.routing
    if a.routing.expert_ids.is_meta:
        return False
    tensors = {"expert_ids": b.routing.expert_ids, "expert_weights": b.routing.expert_weights}
    same = dataclasses.replace(a.routing, **tensors) == b.routing
    same = same and _same_weights(a.routing.expert_weights, b.routing.expert_weights)
    return same and torch.equal(a.routing.expert_ids, b.routing.expert_ids)


LAYOUTS: dict[str, tuple[int, dict[str, int], int, float, list[int]]] = {
    # Ranks, sizes, stages; bytes a token: two ids of a byte for each of 4 layers; bytes in each rank's
    # memory. Rows by sample: 8, 3, 29, none, 1999, 4, and the four groups (samples 0 and 1,
    # 2 and 3, 4, 5) are held by the ranks in turn.
    "PP2xDP2": (4, {"pipeline_model_parallel_size": 2}, 2, 8.0,
                [8 * 6 + 3 * 8, 29 * 8, 1999 * 8, 4 * 8]),
    "PP2, a stage without MoE": (2, {"pipeline_model_parallel_size": 2}, 3, 8.0, [0, 33 * 8]),
    # Both tensor-parallel ranks of a replica read the same bytes.
    "TP2xDP2": (4, {"tensor_model_parallel_size": 2}, 1, 8.0,
                [8 * 8 + 3 * 8, 29 * 8, 1999 * 8, 4 * 8]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_gets_its_layers_of_its_samples(name: str, tmp_path: Path) -> None:
    world, sizes, stages, size, written = LAYOUTS[name]
    ranks = run_ranks(world, exchange, sizes, stages, False, folder=tmp_path)
    for number, (memory, messages) in enumerate(ranks):
        assert memory["moved"] == [(written[number], 0)] * 2
        assert messages["moved"][0] == messages["moved"][1]
        assert messages["moved"][0][0] == 0
        assert messages["moved"][0][1] >= written[number]  # a copy for each reader
        for result in (memory, messages):
            assert result["right"]
            assert result["left"] == 0
            assert result["bytes"] == pytest.approx(size, rel=0.02)
            assert result["whole"] == (number == 0)


def test_weights_arrive_with_their_ids(tmp_path: Path) -> None:
    world, sizes, stages, size, _ = LAYOUTS["PP2xDP2"]
    ranks = run_ranks(world, exchange, sizes, stages, True, folder=tmp_path)
    for number, results in enumerate(ranks):
        for result in results:
            assert result["right"]
            assert result["bytes"] == pytest.approx(size + 4 * NUM_LAYERS * TOPK, rel=0.02)
            assert result["whole"] == (number == 0)


NEEDED = {0: Selection((0, 1, 2), (1,)), 1: Selection((0, 1, 2), (2,)), 2: Selection((1, 2), ())}


def test_ranks_of_one_node_read_what_they_lack() -> None:
    held, nodes = [{0}, {1}, {1, 2}], [0, 0, 0]
    pages = {0: [((2,), 0)], 1: [((1,), 1)], 2: [((1,), 2), ((2,), 2)]}
    assert compute_transfers(0, NEEDED, held, nodes) == Transfers(
        reading=[Transfer(1, 0, Selection((1,), (1,))), Transfer(2, 0, Selection((2,), (1,)))],
        pages=pages,
    )
    assert compute_transfers(2, NEEDED, held, nodes) == Transfers(pages=pages)
    with pytest.raises(RuntimeError, match=r"no rank holds .* for samples \[2\]"):
        compute_transfers(0, NEEDED, [{0}, {1}, set()], nodes)


def test_between_nodes_bytes_travel_once_and_the_receivers_take_turns() -> None:
    same = Selection((0, 1, 2, 3), (1,))
    needed, nodes = {2: same, 3: same}, [0, 0, 2, 2]
    held = [{0, 1, 2}, set(), set(), {3}]
    even, odd = Selection((0, 2), (1,)), Selection((1,), (1,))
    pages = {2: [((1,), 0), ((1,), 2)], 3: [((1,), 1), ((1,), 3)]}
    assert compute_transfers(0, needed, held, nodes) == Transfers(
        leaving=[Transfer(0, 2, even), Transfer(0, 3, odd)]
    )
    assert compute_transfers(1, needed, held, nodes) == Transfers()
    assert compute_transfers(2, needed, held, nodes) == Transfers(
        arriving=[Transfer(0, 2, even)],
        reading=[Transfer(3, 2, Selection((1, 3), (1,)))],
        pages=pages,
    )
    assert compute_transfers(3, needed, held, nodes) == Transfers(
        arriving=[Transfer(0, 3, odd)], reading=[Transfer(2, 3, even)], pages=pages
    )


def test_a_node_is_ranks_that_all_read_each_other() -> None:
    assert nodes_of([{0, 1}, {0, 1}, {2}]) == [0, 0, 2]
    assert nodes_of([{0, 1}, {1}, {2, 0}]) == [0, 1, 2]  # only one way
    assert nodes_of([{0, 1}, {0, 1, 2}, {1, 2}]) == [0, 1, 2]  # not all of them
    assert nodes_of([set(), set()]) == [0, 1]


def moved(nodes: list[int]) -> dict[str, Any]:
    """One of four ranks, two data-parallel pairs: tokens go to trainers, groups to a reader."""
    sizes = ParallelConfig(tensor_model_parallel_size=2)
    mesh = init_mesh(ParallelDims.create(sizes, world_size()), 0)
    whole = make_groups(with_weights=True)
    mine = [g if i % 4 == mesh.rank else outline(g) for i, g in enumerate(whole)]
    samples = [sample for group in mine for sample in group.samples]
    full = [sample for group in whole for sample in group.samples]
    wire = RolloutExchange(mesh, (1, 2, 3, 4))
    wire.transport.nodes = nodes
    tokens = wire.deliver_tokens(samples, SHARES)
    share = SHARES[mesh.dp_rank]
    sent = wire.transport.num_bytes_sent
    delivered = tokens.keys() == share and all(_same_tokens(tokens[i], full[i]) for i in share)
    routes = wire.deliver(samples, SHARES)
    expected = {i: routes_of_trace(t) for i in share if (t := full[i].routing) is not None}
    readers = [1, 1, 3, 2]
    groups_at = wire.move(mine, readers)
    here = [i for i, r in enumerate(readers) if r == mesh.rank]
    together = all(
        _same_tokens(a, b) and _same_routes(a, b)
        for i in here
        for a, b in zip(groups_at[i].samples, whole[i].samples, strict=True)
    )
    held = [i for i, group in enumerate(groups_at) if is_held(group)]
    return {
        "tokens": delivered,
        "routes": _same(routes, expected),
        "moved": together,
        "held": held == sorted({mesh.rank, *here}),
        "sent": sent,
    }


def _same_tokens(a: Sample, b: Sample) -> bool:
    pairs = ((a.token_ids, b.token_ids), (a.rollout_logprobs, b.rollout_logprobs))
    masks = [s.sampling_mask for s in (a, b)]
    if masks[1] is not None:
        assert masks[0] is not None
        pairs += tuple(
            (getattr(masks[0], n), getattr(masks[1], n)) for n in ("token_ids", "counts")
        )
    return all(not x.is_meta and x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 0, 2, 2], [0, 1, 2, 3]], ids=str)
def test_tokens_and_groups_arrive_within_nodes_and_between(
    nodes: list[int], tmp_path: Path
) -> None:
    ranks = run_ranks(4, moved, nodes, folder=tmp_path)
    assert all(rank[what] for rank in ranks for what in ("tokens", "routes", "moved", "held"))
    # Samples 0 and 1, 2 and 3, 4, 5 are of ranks 0 to 3; ranks 0 and 1 train 0, 2 and 5.
    num_bytes = [8 * n for n in [9, 4, 30, 4, 2000, 5]]
    for i, n in ((0, 9), (1, 4)):
        num_bytes[i] += 4 * (n + 3 * (n - 2))  # their sampling masks
    of = num_bytes
    within = [0, 0, 0, 0]
    between = [of[1], of[3], 0, of[5]]
    # A copy for each rank that has none.
    alone = [of[0] + of[1] * 2, of[2] + of[3] * 2, of[4], of[5] * 2]
    expected = {0: within, 2: between}.get(nodes[2], within)
    if nodes == [0, 1, 2, 3]:
        expected = alone
    assert [rank["sent"] for rank in ranks] == expected
