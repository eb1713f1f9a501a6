"""paged_attention against its fp64 oracle, and the bits of a request alone and among others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.kernels import oracle, paged_attention, supports_paged_attention
from tests.kernels.threads import kernel_threads

NUM_ROWS, MAX_POSITIONS = 40, 200
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


class Batch(NamedTuple):
    """The arguments of paged_attention."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    query_starts: Tensor | None = None


def make(
    lengths: list[int],
    *,
    heads: int = 4,
    groups: int = 2,
    sizes: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    new: list[int] | None = None,
    seed: int = 0,
) -> Batch:
    """Make requests whose positions are in random slots of a cache; NaN is in all other slots."""
    rng = torch.Generator().manual_seed(seed)
    num_slots = sum(lengths) + 5
    order = torch.randperm(num_slots, generator=rng).int()
    table = torch.full((NUM_ROWS, MAX_POSITIONS), num_slots + 7, dtype=torch.int32)
    rows = torch.randperm(NUM_ROWS, generator=rng)[: len(lengths)]
    for row, part in zip(rows, order[: sum(lengths)].split(lengths), strict=True):
        table[row, : len(part)] = part
    starts = None if new is None else torch.tensor([0, *new]).cumsum(0)
    num_queries = len(lengths) if new is None else sum(new)
    query, k, v = (
        torch.randn(*shape, generator=rng).mul(1.5).to(dtype)
        for shape in (
            (num_queries, heads, sizes[0]),
            (num_slots, groups, sizes[0]),
            (num_slots, groups, sizes[1]),
        )
    )
    k[order[sum(lengths) :].long()] = torch.nan
    v[order[sum(lengths) :].long()] = torch.nan
    return Batch(query, k, v, table, rows, torch.tensor(lengths), starts)


def check(batch: Batch, **options: Any) -> Tensor:
    options = {"scale": 0.25, **options}
    got, exact = paged_attention(*batch, **options), oracle.paged_attention(*batch, **options)
    assert got.dtype == batch.query.dtype
    out = torch.full_like(got, torch.nan)
    assert paged_attention(*batch, **options, out=out) is out
    assert torch.equal(out, got)
    error = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), exact, atol=error, rtol=error)
    return got


LENGTHS = [1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (9, 3), (8, 1), (7, 1)])
def test_decode_matches_the_oracle(dtype: torch.dtype, heads: int, groups: int) -> None:
    check(make(LENGTHS, heads=heads, groups=groups, dtype=dtype))


@pytest.mark.parametrize("sizes", [(8, 8), (24, 40), (64, 64), (72, 120), (128, 136)])
def test_head_sizes(sizes: tuple[int, int]) -> None:
    check(make([1, 20, 70], sizes=sizes))


@pytest.mark.parametrize("window", [0, 1, 7, 8, 63, 64, 65, 500])
def test_window(window: int) -> None:
    check(make(LENGTHS), window=window)
    check(make([30, 150], new=[30, 20]), window=window)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_extend_matches_the_oracle(dtype: torch.dtype) -> None:
    lengths, new = [1, 8, 9, 40, 64, 130, 70, 5], [1, 8, 9, 3, 64, 66, 1, 0]
    check(make(lengths, new=new, dtype=dtype))


def test_large_scores() -> None:
    """A block with a larger maximum makes earlier blocks vanish, and does not overflow."""
    batch = make([150])
    batch.k_cache.mul_(40)
    check(batch)


def test_a_block_whose_scores_are_all_minus_infinity() -> None:
    """As SDPA: such positions have weight 0."""
    query, k_cache = torch.full((1, 1, 16), 1e20), torch.zeros(100, 1, 16)
    k_cache[:64] = -1e20
    v_cache, table = torch.randn(100, 1, 16), torch.arange(100, dtype=torch.int32)[None]
    place, length = torch.tensor([0]), torch.tensor([100])
    result = paged_attention(query, k_cache, v_cache, table, place, length, scale=0.25)
    torch.testing.assert_close(result[0, 0], v_cache[64:, 0].mean(0), atol=1e-6, rtol=1e-5)


def test_strided_inputs() -> None:
    """The query is a part of the fused projection; MLA's values are a part of its keys."""
    batch = make([3, 80], heads=4, groups=1, sizes=(24, 16))
    wide = torch.cat([batch.query, torch.full_like(batch.query, torch.nan)], dim=1)
    query, value = wide[:, :4], batch.k_cache[..., :16]
    batch = batch._replace(query=query, v_cache=value)
    assert torch.equal(check(batch), check(batch._replace(query=query.contiguous())))


def alone(batch: Batch, i: int) -> Batch:
    """One request of a batch, in another row and in slots of its own."""
    length = int(batch.seq_lens[i])
    slots = batch.req_to_token[batch.req_pool_indices[i], :length].long()
    starts = batch.query_starts
    first, last = (i, i + 1) if starts is None else (int(starts[i]), int(starts[i + 1]))
    return Batch(
        batch.query[first:last],
        batch.k_cache[slots],
        batch.v_cache[slots],
        torch.arange(length, dtype=torch.int32).view(1, -1),
        torch.tensor([0]),
        torch.tensor([length]),
        None if starts is None else torch.tensor([0, last - first]),
    )


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 150), min_size=32, max_size=32),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([(2, 2, 16), (9, 3, 64), (8, 1, 24)]),
    st.sampled_from([None, 20, 64]),
    st.integers(0, 31),
)
def test_a_request_alone_has_the_bits_it_has_among_others(
    lengths: list[int],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    window: int | None,
    i: int,
) -> None:
    heads, groups, size = shape
    batch = make(lengths, heads=heads, groups=groups, sizes=(size, size), dtype=dtype)
    whole = paged_attention(*batch, scale=0.2, window=window)
    assert torch.equal(paged_attention(*alone(batch, i), scale=0.2, window=window)[0], whole[i])


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 150), st.data(), st.sampled_from([None, 20, 64]), st.sampled_from([4, 6])
)  # fmt: skip
def test_a_token_has_the_same_bits_in_decode_and_in_any_extend(
    length: int, data: Any, window: int | None, heads: int
) -> None:
    whole = make([length, 50], new=[length, 50], heads=heads)
    bits = paged_attention(*whole, scale=0.2, window=window)
    first = data.draw(st.integers(0, length - 1))
    last = data.draw(st.integers(first + 1, length))
    part = alone(whole, 0)._replace(
        query=whole.query[first:last],
        seq_lens=torch.tensor([last]),
        query_starts=torch.tensor([0, last - first]),
    )
    assert torch.equal(paged_attention(*part, scale=0.2, window=window), bits[first:last])


def test_threads_do_not_change_a_bit() -> None:
    batches = [make(LENGTHS * 2, heads=8, sizes=(64, 64)), make([200, 150], new=[200, 90])]
    with kernel_threads(1):
        single = [paged_attention(*batch, scale=0.2) for batch in batches]
    with kernel_threads(3):
        for batch, bits in zip(batches, single, strict=True):
            assert torch.equal(paged_attention(*batch, scale=0.2), bits)


TARGETS = ("narrow", "medium", "wide")
ON_EACH_TARGET = """
import os, sys, torch
sys.path.insert(0, sys.argv[2])
from test_paged_attention import LENGTHS, make, paged_attention
folder, _, *targets = sys.argv[1:]
for target in targets:
    if os.fork():
        os.wait()
        continue
    os.environ["MRL_CPU_TARGET"] = target  # read at the first call of an op
    try:
        batch = make(LENGTHS, heads=7, groups=1, sizes=(40, 72))
        torch.save(paged_attention(*batch, scale=0.2), f"{folder}/{target}.pt")
    except Exception as error:
        print(target, error, file=sys.stderr, flush=True)
    os._exit(0)
"""


def test_instruction_sets_agree(tmp_path: Path) -> None:
    """AVX2 and AVX-512 add in the same order and fuse the same products; SSE cannot fuse."""
    done = subprocess.run(
        [sys.executable, "-c", ON_EACH_TARGET, tmp_path, Path(__file__).parent, *TARGETS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = {}
    for target in TARGETS:
        path = tmp_path / f"{target}.pt"
        if path.exists():
            results[target] = torch.load(path)
        else:
            assert f"{target} MRL_CPU_TARGET: got" in done.stderr
    narrow = results.pop("narrow")
    fused = list(results.values())
    for result in fused:
        assert torch.equal(result, fused[0])
        torch.testing.assert_close(result, narrow, atol=1e-6, rtol=1e-5)


def test_no_requests() -> None:
    batch = make([3])
    nothing = batch._replace(
        query=batch.query[:0],
        req_pool_indices=batch.req_pool_indices[:0],
        seq_lens=batch.seq_lens[:0],
    )
    assert paged_attention(*nothing, scale=1.0).shape == (0, 4, 16)


def test_bad_input_is_refused() -> None:
    batch = make([5, 9])

    def refuse(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            paged_attention(*batch._replace(**changes), scale=1.0)

    query, table = batch.query, batch.req_to_token
    assert not supports_paged_attention(query[..., :12], batch.k_cache, batch.v_cache)
    refuse("head sizes that are multiples of 8", query=query[..., :12])
    refuse("got query .* of torch.float64", query=query.double())
    refuse("3 heads are not divisible by 2 groups", query=query[:, :3])
    refuse(r"k_cache: got shape .* expected \[19, 2, 16\]", k_cache=batch.k_cache[:5])
    refuse("req_to_token: got torch.int64", req_to_token=table.long())
    refuse("request 1 has 201 positions and 1 queries", seq_lens=torch.tensor([5, 201]))
    refuse("request 0 has 0 positions and 1 queries", seq_lens=torch.tensor([0, 9]))
    refuse("request 1 has row 40 of the slots", req_pool_indices=torch.tensor([0, NUM_ROWS]))
    refuse("request 1 has a slot out of range", seq_lens=torch.tensor([5, 10]))
    refuse("query_starts: got 0 to 3", query_starts=torch.tensor([0, 1, 3]))
    refuse("request 0 has 5 positions and -1 queries", query_starts=torch.tensor([0, -1, 2]))
    refuse("req_to_token: got device meta", req_to_token=table.to("meta"))
    for window in (-1, 3.0, 1 << 63):
        with pytest.raises(ValueError, match=f"window: got {window}, expected an integer"):
            paged_attention(*batch, scale=1.0, window=window)  # pyright: ignore[reportArgumentType]
    for out in (torch.empty(2, 4, 24), torch.empty(4, 2, 16).transpose(0, 1)):
        with pytest.raises(ValueError, match="out: got"):
            paged_attention(*batch, scale=1.0, out=out)
