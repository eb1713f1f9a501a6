"""`mrl::pack_routes` and `mrl::unpack_routes`: every bit against the oracle, round trips, errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.kernels.oracle import routes as oracle
from mrl.kernels.routes import native_routes, pack_routes, route_row_bytes, unpack_routes
from mrl.types import NATIVE_ROUTE

SIGNED = (torch.int16, torch.int32, torch.int64)
EXPERTS = st.one_of(
    st.integers(1, 600), st.sampled_from([1, 2, 3, 4, 8, 9, 64, 127, 128, 129, 255, 256, 257, 512])
)


def make_ids(
    rows: int, layers: int, topk: int, num_experts: int, seed: int = 0, native: float = 0.0
) -> Tensor:
    """i64[T, L, K] without repeats; a share of the rows has no captured route."""
    rng = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, layers, num_experts, generator=rng)
    free = torch.rand(rows, layers, 1, generator=rng) < native
    return weights.topk(topk).indices.masked_fill(free, NATIVE_ROUTE)


def unpack_all(packed: Tensor, num_experts: int, topk: int) -> Tensor:
    """i64[T, L, K]."""
    rows, layers, _ = packed.shape
    ids = unpack_routes(
        packed, num_experts=num_experts, topk=topk, layers=range(layers), start=0, stop=rows
    )
    return ids.transpose(0, 1)


@st.composite
def route_cases(draw) -> tuple[Tensor, int, torch.dtype]:
    num_experts = draw(EXPERTS)
    # 8 has a path of its own.
    topk = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 9, 10, 16, num_experts]))
    topk = min(topk, num_experts)
    shape = draw(st.integers(0, 12)), draw(st.integers(0, 4))
    native = draw(st.sampled_from([0.0, 0.3, 1.0]))
    dtypes = [torch.uint16] if num_experts > 256 else [torch.uint8, torch.uint16]
    dtype = draw(st.sampled_from([*dtypes, *SIGNED] if native == 0 else SIGNED))
    ids = make_ids(*shape, topk, num_experts, draw(st.integers(0, 2**31)), native)
    return ids, num_experts, dtype


@given(case=route_cases(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_every_bit_matches_the_oracle_and_comes_back(case, data) -> None:
    ids, num_experts, dtype = case
    rows, layers, topk = ids.shape
    packed = pack_routes(ids.to(dtype), num_experts)
    assert packed.shape == (rows, layers, route_row_bytes(num_experts, topk))
    assert torch.equal(packed, oracle.pack_routes(ids, num_experts))
    assert torch.equal(unpack_all(packed, num_experts, topk), ids)

    start = data.draw(st.integers(0, rows))
    wanted = {
        "num_experts": num_experts,
        "topk": topk,
        "layers": data.draw(st.lists(st.integers(0, layers - 1), max_size=6)) if layers else [],
        "start": start,
        "stop": data.draw(st.integers(start, rows)),
    }
    got = unpack_routes(packed, **wanted)
    assert got.dtype == torch.int64
    assert torch.equal(got, oracle.unpack_routes(packed, **wanted))


ROW_BYTES = [
    *[(8, 2, 1), (64, 8, 6), (128, 8, 7), (256, 8, 8), (257, 8, 9), (512, 10, 12), (1, 1, 1)],
    *[(128, 1, 1), (255, 1, 1), (256, 1, 2), (65535, 1, 2), (65535, 4, 8), (2, 2, 1)],
]


@pytest.mark.parametrize(("num_experts", "topk", "size"), ROW_BYTES)
def test_row_bytes(num_experts, topk, size) -> None:
    assert route_row_bytes(num_experts, topk) == size


def test_layout_by_hand() -> None:
    # 3 bits each, the first id lowest: 5 | 1 << 3 | 6 << 6 = 0b1_1000_1101
    packed = pack_routes(torch.tensor([[[5, 1, 6]]], dtype=torch.uint8), 8)
    assert packed.tolist() == [[[0b10001101, 0b1]]]


@pytest.mark.parametrize("topk", [1, 2, 8])
@pytest.mark.parametrize("num_experts", [8, 255, 256, 300])
def test_native_rows(topk, num_experts) -> None:
    ids = torch.full((3, 2, topk), NATIVE_ROUTE, dtype=torch.int16)
    native = native_routes(3, 2, num_experts, topk)
    assert torch.equal(native, pack_routes(ids, num_experts))
    assert bool((native == 0).all()) == (topk > 1)
    assert torch.equal(unpack_all(native, num_experts, topk), ids.long())


@pytest.mark.parametrize("num_experts", [1000, 65535])
@pytest.mark.parametrize("topk", [1, 8, 11])
def test_many_experts(num_experts, topk) -> None:
    ids = make_ids(5, 3, topk, num_experts, native=0.2)
    ids[0, 0] = torch.arange(num_experts - topk, num_experts)
    packed = pack_routes(ids, num_experts)
    assert torch.equal(packed, oracle.pack_routes(ids, num_experts))
    assert torch.equal(unpack_all(packed, num_experts, topk), ids)


@pytest.mark.parametrize(("num_experts", "topk"), [(128, 8), (256, 8), (300, 6)])
def test_same_bits_for_one_and_two_threads(num_experts, topk) -> None:
    dtype = torch.uint8 if num_experts <= 256 else torch.uint16
    ids = make_ids(3001, 7, topk, num_experts)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            packed = pack_routes(ids.to(dtype), num_experts)
            results.append((packed, unpack_all(packed, num_experts, topk)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], ids)
    assert torch.equal(results[1][1], ids)


def test_packs_into_rows_of_a_larger_buffer() -> None:
    ids = make_ids(20, 3, 8, 128)
    buffer = native_routes(40, 3, 128, 8)
    pack_routes(ids.to(torch.uint8), 128, out=buffer[7:27])
    assert torch.equal(buffer[7:27], pack_routes(ids, 128))
    assert bool((buffer[:7] == 0).all())
    assert bool((buffer[27:] == 0).all())  # rows are stored as words: none may reach over the end


def test_strided_ids_and_packed_rows() -> None:
    ids = make_ids(6, 4, 2, 16)
    packed = pack_routes(ids.to(torch.uint8)[:, ::2], 16)
    assert torch.equal(packed, pack_routes(ids[:, ::2].contiguous(), 16))
    assert torch.equal(unpack_all(packed[::3], 16, 2), ids[::3, ::2])


def bad_ids(changes: dict[int, int], dtype: torch.dtype, topk: int) -> Tensor:
    ids = make_ids(700, 3, topk, 100)
    ids[523, 2] = torch.arange(topk)
    for k, value in changes.items():
        ids[523, 2, k] = value
    ids[600, 0] = ids[523, 2]  # the first one is named
    return ids.to(dtype)


@pytest.mark.parametrize("topk", [2, 8])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({0: 100}, r"\[100, 1.*ids from 0 to 99"),
        ({1: 255}, r"\[0, 255.*ids from 0 to 99"),
        ({0: -2}, r"\[-2, 1.*ids from 0 to 99"),
        ({1: 0}, r"\[0, 0.*no id twice"),
        ({0: -1}, r"\[-1, 1.*no native id"),
        ({1: -1}, r"\[0, -1.*no native id"),
    ],
)
def test_refused_rows_are_named(topk, changes, expected) -> None:
    for dtype in (torch.uint8, torch.uint16, *SIGNED):
        if dtype in (torch.uint8, torch.uint16) and min(changes.values()) < 0:
            continue
        with pytest.raises(ValueError, match=r"expert_ids: got .* in row 523, layer 2") as error:
            pack_routes(bad_ids(changes, dtype, topk), 100)
        assert error.match(expected)


@pytest.mark.parametrize("distance", range(1, 8))
def test_every_pair_of_eight_is_compared(distance) -> None:
    for first in range(8 - distance):
        ids = torch.arange(8, dtype=torch.uint8).reshape(1, 1, 8)
        ids[..., first + distance] = first
        with pytest.raises(ValueError, match="no id twice"):
            pack_routes(ids, 256)


@pytest.mark.parametrize(
    ("ids", "num_experts", "message"),
    [
        (torch.zeros(2, 3), 8, r"expert_ids: got shape \[2, 3\], expected \[T, L, K\]"),
        (torch.zeros(2, 3, 1), 8, "expert_ids: got dtype torch.float32, expected one of"),
        (torch.zeros(2, 3, 1).int(), 0, "num_experts: got 0, expected 1 to 65535"),
        (torch.zeros(2, 3, 1).int(), 65536, "num_experts: got 65536, expected 1 to 65535"),
        (torch.zeros(2, 3, 9).int(), 8, "topk: got 9, expected 1 to 8"),
        (torch.zeros(2, 3, 0).int(), 8, "topk: got 0, expected 1 to 8"),
    ],
)
def test_bad_ids_are_named(ids, num_experts, message) -> None:
    with pytest.raises(ValueError, match=message):
        pack_routes(ids, num_experts)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(2, 3, 2).byte(), r"out: got shape \[2, 3, 2\], expected \[2, 3, 1\]"),
        (torch.zeros(2, 3, 1), "out: got dtype torch.float32"),
        (torch.zeros(3, 2, 1).byte().transpose(0, 1), "out: got strides .*contiguous"),
    ],
)
def test_bad_out_is_named(out, message) -> None:
    with pytest.raises(ValueError, match=message):
        pack_routes(make_ids(2, 3, 2, 8), 8, out=out)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("packed", torch.zeros(5, 3).byte(), r"packed: got shape \[5, 3\], expected \[N, L, 7\]"),
        ("packed", torch.zeros(5, 3, 8).byte(), r"packed: got shape .*, expected \[5, 3, 7\]"),
        ("packed", torch.zeros(5, 3, 7), "packed: got dtype torch.float32"),
        ("topk", 129, "topk: got 129, expected 1 to 128"),
        ("layers", [0, 3], "layers: got 3, expected 0 to 2"),
        ("layers", [-1], "layers: got -1, expected 0 to 2"),
        ("start", -1, "start: got -1, expected 0 to 5"),
        ("start", 6, "start: got 6, expected 0 to 5"),
        ("stop", 1, "stop: got 1, expected 2"),
        ("stop", 6, "stop: got 6, expected 2"),
    ],
)
def test_bad_unpack_is_named(field, value, message) -> None:
    good = {
        "packed": native_routes(5, 3, 128, 8),
        "num_experts": 128,
        "topk": 8,
        "layers": [2, 0],
        "start": 2,
        "stop": 4,
    }
    assert unpack_routes(**good).shape == (2, 2, 8)
    with pytest.raises(ValueError, match=message):
        unpack_routes(**{**good, field: value})


def test_opcheck() -> None:
    ids = make_ids(6, 3, 8, 128)
    packed = pack_routes(ids, 128)
    torch.library.opcheck(torch.ops.mrl.pack_routes.default, (ids, 128, torch.empty_like(packed)))
    torch.library.opcheck(torch.ops.mrl.unpack_routes.default, (packed, 128, 8, [2, 0], 1, 5))


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
@pytest.mark.parametrize(
    ("num_experts", "topk"), [(128, 8), (256, 8), (512, 10), (300, 1), (2, 2), (65535, 3)]
)
def test_cuda_kernels_give_the_same_bits(emulated_cuda, order, num_experts, topk) -> None:
    ids = make_ids(150, 3, topk, min(num_experts, 600), native=0.2)
    packed = pack_routes(ids, num_experts)
    unsigned = ids.clamp(min=0) if topk == 1 else make_ids(9, 3, topk, min(num_experts, 256))
    wanted = {"num_experts": num_experts, "topk": topk, "layers": [2, 0], "start": 3, "stop": 140}
    with emulated_cuda(order):
        assert torch.equal(pack_routes(ids, num_experts), packed)
        for dtype in (torch.uint16, *SIGNED[:2]):
            bits = pack_routes(unsigned.to(dtype), num_experts)
            assert torch.equal(bits, oracle.pack_routes(unsigned, num_experts))
        got = unpack_routes(packed, **wanted)
        many = unpack_routes(packed, **{**wanted, "layers": [i % 3 for i in range(300)]})
    assert torch.equal(got, ids[3:140, [2, 0]].transpose(0, 1))
    assert torch.equal(many, ids[3:140, [i % 3 for i in range(300)]].transpose(0, 1))


@pytest.mark.parametrize("changes", [{0: 100}, {0: -2}, {1: 0}, {0: -1}])
def test_cuda_kernel_traps_on_refused_rows(emulated_cuda, changes) -> None:
    with emulated_cuda(), pytest.raises(ValueError, match="expert_ids"):
        pack_routes(bad_ids(changes, torch.int16, 8), 100)
