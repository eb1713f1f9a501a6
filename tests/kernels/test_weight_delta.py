"""`mrl.kernels.weight_delta` against its oracle, byte for byte, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.kernels import oracle, weight_delta
from mrl.kernels.weight_delta import BITS, CHUNK, apply, encode, encode_in_torch
from tests.kernels.threads import kernel_threads

ANY = 1 << 40
SIZES = tuple(BITS)
shares = st.sampled_from([0.0, 1e-4, 0.01, 0.12, 0.13, 0.6, 1.0])


def flat(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def versions(size: int, num: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return two versions u8[num * size]; each element of the second differs with this probability."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, (num, size), dtype=np.uint8)
    new = old.copy()
    new[rng.random(num) < share, rng.integers(size)] ^= np.uint8(1 << rng.integers(8))
    return torch.from_numpy(old).view(-1), torch.from_numpy(new).view(-1)


def reference(old: Tensor, new: Tensor, size: int) -> bytes:
    return oracle.weight_delta(old.numpy().tobytes(), new.numpy().tobytes(), size)


def payload_of(old: Tensor, new: Tensor, size: int) -> Tensor:
    payload = encode(old, new, size, ANY).payload
    assert payload is not None
    return payload


@given(
    size=st.sampled_from(SIZES), num=st.integers(0, 3000), share=shares, seed=st.integers(0, 999)
)
@settings(max_examples=60, deadline=None)
def test_bytes_are_those_of_the_oracle_and_give_the_newer_version(
    size: int, num: int, share: float, seed: int
) -> None:
    old, new = versions(size, num, share, seed)
    expected = reference(old, new, size)
    for form in (encode, encode_in_torch):
        found = form(old, new, size, ANY)
        assert found.payload is not None
        assert found.payload.numpy().tobytes() == expected
        assert found.num_changed == int((old.view(-1, size) != new.view(-1, size)).any(1).sum())
        base = old.clone()
        apply(base, found.payload, size)
        assert torch.equal(base, new)


@pytest.mark.parametrize("share", [1e-5, 0.003, 0.2])
def test_several_chunks(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have gaps and others bitmaps; torch compares them in pieces."""
    monkeypatch.setattr(weight_delta, "TORCH_PIECE", 2 * CHUNK)
    old, new = versions(2, 3 * CHUNK + 77, share, 5)
    new[2 * CHUNK : 3 * CHUNK] ^= torch.arange(CHUNK).remainder(3).eq(0).to(torch.uint8)
    payload = payload_of(old, new, 2)
    assert payload.numpy().tobytes() == reference(old, new, 2)
    assert torch.equal(payload, encode_in_torch(old, new, 2, ANY).payload)  # pyright: ignore
    with kernel_threads(3):
        assert torch.equal(payload, payload_of(old, new, 2))
        base = old.clone()
        apply(base, payload, 2)
    assert torch.equal(base, new)


@pytest.mark.parametrize("at", [0, 254, 255, 256, 510, CHUNK - 1, CHUNK, CHUNK + 255])
def test_one_element_at_the_edges_of_gaps_and_chunks(at: int) -> None:
    old = torch.zeros(CHUNK + 300, dtype=torch.bfloat16)
    new = old.clone()
    new[at] = -0.0  # equal as a number, and other bits
    payload = payload_of(flat(old), flat(new), 2)
    assert payload.numpy().tobytes() == reference(flat(old), flat(new), 2)
    base = flat(old.clone())
    apply(base, payload, 2)
    assert torch.equal(base, flat(new))


@pytest.mark.parametrize("form", [encode, encode_in_torch])
def test_a_delta_above_the_limit_is_not_made_but_counted(form) -> None:
    old, new = versions(2, 2000, 0.05, 1)
    found = form(old, new, 2, ANY)
    size = found.payload.numel()
    assert form(old, new, 2, size).payload is not None
    assert form(old, new, 2, size - 1) == (None, found.num_changed)


def test_damaged_deltas_are_refused() -> None:
    old, new = versions(2, 1000, 0.05, 2)
    payload = payload_of(old, new, 2)
    num = encode(old, new, 2, ANY).num_changed
    for offset, number in ((0, num - 1), (0, num + 1), (0, -1), (4, 3)):
        damaged = payload.clone()
        damaged[offset : offset + 4] = flat(torch.tensor([number], dtype=torch.int32))
        with pytest.raises(ValueError, match="expected"):
            apply(old.clone(), damaged, 2)
    late = payload.clone()
    late[8 + 2 * num :] = 254
    with pytest.raises(ValueError, match="positions: they are not those"):
        apply(old.clone(), late, 2)
    for short in (payload[:4], payload[:-1]):
        with pytest.raises(ValueError, match=f"payload: got {short.numel()} B, expected"):
            apply(old.clone(), short, 2)
    with pytest.raises(ValueError, match="positions: they are not those"):
        apply(old[:600].clone(), payload, 2)  # a smaller base with as many chunks


def test_refusals() -> None:
    old = torch.zeros(30, dtype=torch.uint8)
    with pytest.raises(ValueError, match="current: got 20 B, expected 30 B"):
        encode(old, old[:20], 2, ANY)
    for size in (3, 4):
        with pytest.raises(ValueError, match=f"element_size: got {size} for 30 B"):
            encode(old, old, size, ANY)


WITHOUT_TORCH = """
import subprocess
import sys

import numpy as np
from mrl import _C
for size, num in ((1, 1000), (2, 999), (4, 130), (8, 64)):
    rng = np.random.default_rng(size)
    old = rng.integers(0, 256, num * size, dtype=np.uint8)
    new = np.where(rng.random(num * size) < 0.2, 255 - old, old)
    marks, counts = np.zeros(1024, np.uint64), np.zeros(2, np.uint32)
    _C.weight_delta_mark_cpu(before=old.ctypes.data, after=new.ctypes.data, element_size=size,
                             num_elements=num, num_threads=1, marks=marks.ctypes.data,
                             changed=counts[:1].ctypes.data, position_bytes=counts[1:].ctypes.data)
    bits = np.unpackbits(marks.view(np.uint8), bitorder="little")
    expected = (old != new).reshape(num, size).any(1)
    assert (bits[:num] == expected).all() and not bits[num:].any()
    assert counts[0] == expected.sum()
print("right")
"""
"""It chooses the instruction set once a process; torch would take seconds to import."""


@pytest.mark.parametrize("target", ["narrow", "medium", "wide"])
def test_every_instruction_set_marks_the_same(target: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        env={"MRL_CPU_TARGET": target, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    if "one that this processor has" in done.stderr:
        pytest.skip(f"this processor has no {target} instructions")
    assert done.stdout == "right\n", done.stderr
