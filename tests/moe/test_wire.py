"""The form of routes between ranks: round trips bit for bit, its size; memory shared by processes."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.align import split_rows
from moe.wire import ROWS_AT_ONCE, from_wire, to_wire, wire_row_bytes
from mrl.kernels.routes import native_routes, pack_routes
from mrl.system.shared_memory import SharedBytes
from mrl.types import PackedRoutes


def make_routes(rows: int, layers: int, experts: int, topk: int, seed: int = 0) -> PackedRoutes:
    """Some rows are native."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, layers, experts, generator=generator).topk(topk).indices
    packed = pack_routes(ids, experts)
    packed[::5] = native_routes(1, layers, experts, topk)
    return PackedRoutes(packed, tuple(range(1, layers + 1)), experts, topk)


@given(
    rows=st.integers(0, 9),
    layers=st.integers(0, 5),
    experts=st.sampled_from([1, 2, 3, 8, 60, 64, 128, 255, 256, 257, 512]),
    topk=st.integers(1, 10),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_round_trip(rows: int, layers: int, experts: int, topk: int, seed: int) -> None:
    routes = make_routes(rows, layers, experts, min(topk, experts), seed)
    wire = to_wire(routes)
    assert wire.shape == (rows, wire_row_bytes(layers, experts, routes.topk))
    back = from_wire(wire, routes.layer_numbers, experts, routes.topk)
    assert torch.equal(back.packed, routes.packed)
    assert (back.layer_numbers, back.topk) == (routes.layer_numbers, routes.topk)


@pytest.mark.parametrize("rows", [1, 5])
def test_weights_travel_with_their_ids(rows: int) -> None:
    """One row of 3 bytes of ids: its weights begin where no float may."""
    bare = make_routes(rows, 3, 8, 2)
    routes = dataclasses.replace(bare, weights=torch.rand(rows, 3, 2))
    wire = to_wire(routes)
    assert wire.shape == (rows, wire_row_bytes(3, 8, 2, with_weights=True))
    assert wire.shape[1] == to_wire(bare).shape[1] + 3 * 2 * 4
    back = from_wire(wire, routes.layer_numbers, 8, 2, with_weights=True)
    assert torch.equal(back.packed, routes.packed)
    assert back.weights is not None
    assert routes.weights is not None
    assert torch.equal(back.weights, routes.weights)
    first, second = split_rows(back, [rows // 2, rows - rows // 2])
    assert torch.equal(torch.cat([first.weights, second.weights]), routes.weights)
    with pytest.raises(ValueError, match="of 8 experts with weights, got shape"):
        from_wire(to_wire(bare), routes.layer_numbers, 8, 2, with_weights=True)


def test_many_rows() -> None:
    routes = make_routes(2 * ROWS_AT_ONCE + 3, 2, 8, 2)
    back = from_wire(to_wire(routes), routes.layer_numbers, 8, 2)
    assert torch.equal(back.packed, routes.packed)


def test_layout_by_hand() -> None:
    # Layers of 2 ids of 3 bits: (5, 1) then (6, 2), lowest first: 5 | 1 << 3 | 6 << 6 | 2 << 9.
    packed = pack_routes(torch.tensor([[[5, 1], [6, 2]]]), 8)
    assert to_wire(PackedRoutes(packed, (1, 2), 8, 2)).tolist() == [[0b10001101, 0b101]]


SHAPES = [
    # Layers, top-k, experts of the toy, Qwen3-30B-A3B, DeepSeek-V3, Mixtral 8x7B, gpt-oss-120b,
    # Qwen1.5-MoE.
    *[(4, 2, 8), (48, 8, 128), (58, 8, 256), (32, 2, 8), (36, 4, 128), (24, 4, 60)],
]


@pytest.mark.parametrize(("layers", "topk", "experts"), SHAPES)
def test_a_row_is_no_larger_than_its_bits(layers: int, topk: int, experts: int) -> None:
    bits = layers * topk * math.ceil(math.log2(experts))
    assert wire_row_bytes(layers, experts, topk) == math.ceil(bits / 8)
    assert to_wire(make_routes(6, layers, experts, topk)).nbytes == 6 * math.ceil(bits / 8)


def test_rows_of_another_size_are_refused() -> None:
    wire = to_wire(make_routes(4, 4, 8, 2))
    with pytest.raises(
        ValueError, match="expected 4 bytes a row for 5 layers x top-2 of 8 experts"
    ):
        from_wire(wire, (1, 2, 3, 4, 5), 8, 2)


def test_split_rows() -> None:
    routes = make_routes(7, 2, 8, 2)
    first, second = split_rows(routes, [3, 4])
    assert torch.equal(first.packed, routes.packed[:3])
    assert torch.equal(second.packed, routes.packed[3:])


def test_memory_of_another_process() -> None:
    """Read while it lives; gone, with nothing left anywhere, when it is killed."""
    before = set(os.listdir("/dev/shm"))
    shared = SharedBytes()
    values = torch.arange(200, dtype=torch.uint8)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(told)
            own = SharedBytes()
            own.write(10, values)
            os.write(tell, f"{own.handle.fd} {own.handle.nonce.hex()} {own.num_bytes}".encode())
            signal.pause()
        finally:
            os._exit(1)  # never into pytest, of which this is a copy
    os.close(tell)  # a child that fails ends the read below
    try:
        fd, nonce, num_bytes = os.read(told, 200).decode().split()
        handle = type(shared.handle)(child, int(fd), bytes.fromhex(nonce))
        assert num_bytes == "210"
        assert handle.can_be_read()
        assert not type(handle)(child, int(fd), b"x" * 16).can_be_read()
        parts = [torch.empty(n, dtype=torch.uint8) for n in (3, 7)]
        handle.read([(10, parts[0]), (100, parts[1])])
        assert torch.equal(parts[0], values[:3])
        assert torch.equal(parts[1], values[90:97])
        with pytest.raises(RuntimeError, match="moved 5 bytes, expected 7"):
            handle.read([(205, parts[1])])
    finally:
        os.close(told)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not handle.can_be_read()
    with pytest.raises(RuntimeError, match=f"memory shared by process {child}"):
        handle.read([(0, parts[0])])
    ours = {str(os.getpid()), str(child)}  # others make and remove files there meanwhile
    new = set(os.listdir("/dev/shm")) - before
    assert not [name for name in new if ours & set(re.findall(r"\d+", name))]


def test_cleared_memory_is_given_back() -> None:
    shared = SharedBytes()
    shared.write(0, torch.ones(1000, dtype=torch.uint8))
    shared.clear()
    assert shared.num_bytes == 0
    assert shared.handle.can_be_read()
