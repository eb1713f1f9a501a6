"""Micro-batch plans: complete, within budget, equal in number; packed fields line up."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.types import NATIVE_ROUTE, Sample
from parallel.packing import WeightedSample, pack, plan


@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    dp=st.integers(1, 5),
    budget=st.integers(1, 100),
    multiple_of=st.integers(1, 4),
)
def test_plan(lengths: list[int], dp: int, budget: int, multiple_of: int) -> None:
    shares = plan(lengths, dp, budget, multiple_of)
    assert sorted(i for share in shares for batch in share for i in batch) == list(
        range(len(lengths))
    )
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) % multiple_of == 0
    for share in shares:
        for batch in share:
            assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= budget


def test_plan_balances_data_parallel_ranks() -> None:
    lengths = [50, 1, 1, 1, 1, 46]
    loads = [sum(lengths[i] for b in share for i in b) for share in plan(lengths, 2, 1000)]
    assert loads == [50, 50]


def test_pack_lays_samples_end_to_end_and_pads(samples: list[Sample]) -> None:
    chosen = samples[:3]
    batch = pack([WeightedSample(s, float(i), 0.5) for i, s in enumerate(chosen)], 8)
    lengths = [len(s.token_ids) for s in chosen]
    total = sum(lengths)
    assert batch.num_tokens % 8 == 0
    assert batch.cu_seqlens.tolist() == [0, 7, 38, 50, batch.num_tokens]
    assert torch.equal(batch.input_ids[:total], torch.cat([s.token_ids for s in chosen]))
    assert batch.position_ids[7:12].tolist() == [0, 1, 2, 3, 4]
    assert not batch.loss_mask[total:].any()
    assert batch.advantages.tolist() == [0.0, 1.0, 2.0, 0.0]
    assert batch.seq_weight.tolist() == [0.5, 0.5, 0.5, 0.0]
    assert batch.expert_ids is not None
    native = (batch.expert_ids == NATIVE_ROUTE).all(-1).all(-1)
    assert native.nonzero().flatten().tolist() == [6, 37, *range(49, batch.num_tokens)]
    traced = batch.expert_ids[7:37]
    routing = chosen[1].routing
    assert routing is not None
    assert torch.equal(traced, routing.expert_ids.to(torch.int16))


def test_no_samples_make_a_batch_of_padding() -> None:
    batch = pack([], 4)
    assert batch.num_tokens == 4
    assert not batch.loss_mask.any()
    assert batch.cu_seqlens.tolist() == [0, 4]
