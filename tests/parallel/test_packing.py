"""Micro-batches hold every sample, keep to the budget, are equal in number; packed fields line up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.align import join_routes, local_routes, routes_of_trace, routes_of_traces
from mrl.types import NATIVE_ROUTE, Sample
from parallel.packing import WeightedSample, assign_micro_batches, pack, to_device
from tests.parallel.conftest import weighted
from tests.sample_groups import sample as plain_sample


@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    dp=st.integers(1, 5),
    budget=st.integers(1, 100),
    multiple_of=st.integers(1, 4),
)
def test_plan(lengths: list[int], dp: int, budget: int, multiple_of: int) -> None:
    shares = assign_micro_batches(lengths, dp, budget, multiple_of)
    assert sorted(i for share in shares for batch in share for i in batch) == list(
        range(len(lengths))
    )
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) % multiple_of == 0
    for share in shares:
        for batch in share:
            assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= budget


def test_assignment_balances_data_parallel_ranks() -> None:
    lengths = [50, 1, 1, 1, 1, 46]
    loads = [
        sum(lengths[i] for b in share for i in b)
        for share in assign_micro_batches(lengths, 2, 1000)
    ]
    assert loads == [50, 50]


def test_pack_lays_samples_end_to_end_and_pads(samples: list[Sample]) -> None:
    chosen = samples[:3]
    batch = pack([weighted(s, float(i), 0.5) for i, s in enumerate(chosen)], 8)
    lengths = [len(s.token_ids) for s in chosen]
    total = sum(lengths)
    assert batch.num_tokens % 8 == 0
    assert batch.cu_seqlens.tolist() == [0, 7, 38, 50, batch.num_tokens]
    assert torch.equal(batch.input_ids[:total], torch.cat([s.token_ids for s in chosen]))
    assert batch.position_ids[7:12].tolist() == [0, 1, 2, 3, 4]
    assert not batch.loss_mask[total:].any()
    assert batch.advantages.tolist() == [0.0, 1.0, 2.0, 0.0]
    assert batch.seq_weight.tolist() == [0.5, 0.5, 0.5, 0.0]
    assert batch.routes is not None
    numbers = batch.routes.layer_numbers
    routes = local_routes(batch.routes, numbers, 0, 1)
    expert_ids = torch.stack([routes[number] for number in numbers], dim=1)
    native = (expert_ids == NATIVE_ROUTE).all(-1).all(-1)
    assert native.nonzero().flatten().tolist() == [6, 37, *range(49, batch.num_tokens)]
    traced = expert_ids[7:37]
    routing = chosen[1].routing
    assert routing is not None
    assert torch.equal(traced, routing.expert_ids.long())


def test_each_rank_gets_its_own_rows_and_layers(samples: list[Sample]) -> None:
    batch = pack([weighted(s) for s in samples[:3]], 4)
    assert batch.routes is not None
    numbers = batch.routes.layer_numbers
    whole = local_routes(batch.routes, numbers, 0, 1)
    for wanted in (numbers, numbers[1:], numbers[::-1], numbers[:1], ()):
        parts = [local_routes(batch.routes, wanted, rank, 4) for rank in range(4)]
        assert all(tuple(part) == tuple(wanted) for part in parts)
        for number in wanted:
            assert torch.equal(torch.cat([part[number] for part in parts]), whole[number])


def test_routes_of_other_layers_are_refused(samples: list[Sample]) -> None:
    batch = pack([weighted(samples[0])], 1)
    with pytest.raises(ValueError, match=r"the model has MoE layers \[77\], the traces only"):
        local_routes(batch.routes, [77], 0, 1)


def test_traces_that_do_not_fit_are_refused(samples: list[Sample]) -> None:
    first, second = samples[0].routing, samples[1].routing
    assert first is not None
    assert second is not None
    length = len(samples[0].token_ids)
    with pytest.raises(ValueError, match=f"expected {length} rows for {length + 1} tokens"):
        join_routes([routes_of_trace(first)], [length + 1])
    lengths = [length, len(samples[1].token_ids)]
    layers = tuple(number + 1 for number in second.layer_numbers)
    for change, message in [
        ({"layer_numbers": layers}, "traces of different layers in one batch"),
        ({"num_experts": 99}, "traces of different models in one batch: 2 of 99 experts"),
        ({"expert_ids": second.expert_ids[..., :1]}, "different models in one batch: 1 of 4"),
    ]:
        parts = [routes_of_trace(first), routes_of_trace(dataclasses.replace(second, **change))]
        with pytest.raises(ValueError, match=message):
            join_routes(parts, lengths)
        with pytest.raises(ValueError, match="different models in one batch"):
            routes_of_traces([first, dataclasses.replace(second, **change)], first.layer_numbers)


def test_every_tensor_of_a_batch_moves(samples: list[Sample]) -> None:
    batch = pack([weighted(s) for s in samples[:2]], 4)
    moved = to_device(batch, torch.device("meta"))
    assert moved.routes is not None
    assert moved.routes.expert_ids.device.type == "meta"
    assert moved.routes.captured.device.type == "meta"
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            assert getattr(moved, name).device.type == "meta"


def test_turn_rewards_lie_at_the_last_loss_token_of_their_turn() -> None:
    """A turn without loss tokens gives its reward to one before; what nothing earned is left out."""
    mask = torch.tensor([0, 0, 0, 1, 0, 0, 1, 1, 0, 0]).bool()
    turns = ((2, 9.0), (5, 0.25), (8, 0.5), (10, 2.0))
    one = dataclasses.replace(plain_sample(8), loss_mask=mask, turn_rewards=turns)
    given = [WeightedSample(one, None, 1.0, credits_turns=on) for on in (True, False)]
    batch = pack(given[:1], 4)
    assert batch.token_rewards is not None
    assert batch.token_rewards.tolist() == [0, 0, 0, 0.25, 0, 0, 0, 2.5, 0, 0, 0, 0]
    assert pack(given[1:], 4).token_rewards is None
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [False, False]


def test_no_samples_make_a_batch_of_padding() -> None:
    batch = pack([], 4)
    assert batch.num_tokens == 4
    assert not batch.loss_mask.any()
    assert batch.cu_seqlens.tolist() == [0, 4]
