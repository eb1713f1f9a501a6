"""Context parallelism: every token once, the same work on every rank, padding that changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.align import local_routes
from mrl.types import NATIVE_ROUTE, Sample
from parallel.context import blocks_of_rank
from parallel.packing import pack
from tests.parallel.conftest import weighted


def bounds_of(chunks: list[int], size: int) -> list[int]:
    return [0, *torch.tensor([n * 2 * size for n in chunks]).cumsum(0).tolist()]


@given(chunks=st.lists(st.integers(1, 6), min_size=1, max_size=5), size=st.integers(1, 5))
def test_every_token_is_on_one_rank_and_the_work_is_balanced(chunks: list[int], size: int) -> None:
    bounds = bounds_of(chunks, size)
    ranks = [blocks_of_rank(bounds, rank, size) for rank in range(size)]
    packed = torch.cat([block.packed for blocks in ranks for block in blocks])
    assert packed.sort().values.tolist() == list(range(bounds[-1]))
    for blocks in ranks:  # a rank's tokens lie end to end
        assert [b.local_start for b in blocks] == [
            sum(b.num_tokens for b in blocks[:i]) for i in range(len(blocks))
        ]
    # Query-key pairs of a causal block: all keys before it, and its own triangle.
    work = {
        sum(b.num_tokens * b.offset + b.num_tokens * (b.num_tokens + 1) // 2 for b in blocks)
        for blocks in ranks
    }
    assert len(work) == 1


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(
        ValueError, match="a packed sequence has 6 tokens, expected a multiple of 4"
    ):
        blocks_of_rank([0, 4, 10], 0, 2)


def test_padding_within_sequences_has_no_loss_and_no_route(samples: list[Sample]) -> None:
    chosen = samples[:2]  # 7 and 31 tokens
    parts = [weighted(s, 1.0, 0.5) for s in chosen]
    plain = pack(parts)
    padded = pack(parts, 24, sequence_multiple=8, min_rows=50)
    assert padded.cu_seqlens.tolist() == [0, 8, 40, 72]
    assert padded.position_ids[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    real = torch.tensor([*range(7), *range(8, 39)])
    for name in ("input_ids", "loss_mask", "rollout_logprobs"):
        assert torch.equal(getattr(padded, name)[real], getattr(plain, name)), name
    assert int(padded.loss_mask.sum()) == int(plain.loss_mask.sum())
    assert plain.routes is not None
    assert padded.routes is not None
    numbers = plain.routes.layer_numbers
    ours = local_routes(padded.routes, numbers, 0, 1)
    theirs = local_routes(plain.routes, numbers, 0, 1)
    pads = torch.ones(72, dtype=torch.bool)
    pads[real] = False
    for number in numbers:
        assert torch.equal(ours[number][real], theirs[number])
        assert (ours[number][pads] == NATIVE_ROUTE).all()
