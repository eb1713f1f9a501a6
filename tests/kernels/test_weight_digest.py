"""`mrl.kernels.digest` against plain Python integers, and what it must and must not depend on."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.kernels.digest import MODULUS, digest_in_torch, digest_place, weight_digest
from tests.kernels.threads import kernel_threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mix(x: int) -> int:
    """MurmurHash3's finalizer, one number at a time; as a signed number."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    x ^= x >> 16
    return x - 2**32 if x >= 2**31 else x


def oracle(weights: torch.Tensor) -> int:
    bits = weights.flatten().float().numpy().view(np.uint32).tolist()
    return sum(mix(x) for x in bits) % MODULUS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_sums_equal_plain_integers(dtype, size):
    weights = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    assert weight_digest(weights) == [oracle(weights)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_is_widened_exactly(dtype):
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    halves = halves[~halves.isnan()]  # which NaN comes out is the processor's choice
    assert weight_digest(halves, halves.numel()) == weight_digest(halves.float(), halves.numel())


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_form_is_the_same(dtype, monkeypatch):
    monkeypatch.setattr("mrl.kernels.digest.CHUNK", 64)  # so that rows and columns are split
    rows = torch.randn(7, 150, generator=torch.Generator().manual_seed(0)).to(dtype)
    for view in (rows, rows[:, :10].contiguous(), rows[:0]):
        got = [digest % MODULUS for digest in digest_in_torch([view, rows.float()]).tolist()]
        assert got == [oracle(row) for row in (*view, *rows.float())]


def test_threads_change_nothing():
    weights = torch.randn(200_001)
    one = weight_digest(weights)
    with kernel_threads(3):
        assert weight_digest(weights) == one


WITHOUT_TORCH = """
import numpy as np
from mrl import _C
bits = np.linspace(-9, 9, 3333, dtype=np.float32).view(np.uint32)
for kind, x in enumerate((bits, (bits >> 16).astype(np.uint16), np.arange(0x7c00, dtype=np.uint16))):
    sums = np.zeros(1, dtype=np.uint64)
    _C.weight_digest_cpu(weights=x.ctypes.data, type=kind, num_groups=1, group_size=x.size,
                         sums=sums.ctypes.data, num_threads=1)
    print(sums[0])
"""
"""It chooses the instruction set once a process; torch would take seconds to import."""


@pytest.mark.parametrize("target", ["narrow", "medium", "wide"])
def test_every_instruction_set_gives_the_same(target):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        env={"MRL_CPU_TARGET": target, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    if "one that this processor has" in done.stderr:
        pytest.skip(f"this processor has no {target} instructions")
    bits = np.linspace(-9, 9, 3333, dtype=np.float32).view(np.uint32)
    high = (bits >> 16) << 16
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    expected = [oracle(torch.from_numpy(x.view(np.float32))) for x in (bits, high, halves)]
    assert [int(line) for line in done.stdout.split()] == expected


@given(seed=st.integers(0, 2**31), shards=st.integers(1, 5), dtype=st.sampled_from(DTYPES))
@settings(max_examples=25, deadline=None)
def test_order_shards_and_padding_change_nothing(seed, shards, dtype):
    rng = torch.Generator().manual_seed(seed)
    weights = torch.randn(40, 6, generator=rng).to(dtype)
    whole = weight_digest(weights)[0]
    shuffled = weights.flatten()[torch.randperm(240, generator=rng)]
    assert weight_digest(shuffled)[0] == whole
    parts = [weight_digest(part)[0] for part in weights.t().chunk(shards)]
    assert sum(parts) % MODULUS == whole
    assert weight_digest(torch.cat([weights, torch.zeros(9, 6, dtype=dtype)]))[0] == whole
    assert weight_digest(weights.float())[0] == whole


@given(seed=st.integers(0, 2**31), bit=st.integers(0, 31))
@settings(max_examples=50, deadline=None)
def test_one_changed_bit_changes_the_sum(seed, bit):
    rng = torch.Generator().manual_seed(seed)
    weights = torch.randn(100, generator=rng)
    before = weight_digest(weights)
    weights.view(torch.int32)[seed % 100] ^= -(2**31) if bit == 31 else 1 << bit
    assert weight_digest(weights) != before


def test_groups_and_refusals():
    rows = torch.randn(4, 10)
    assert weight_digest(rows, 4) == [weight_digest(row)[0] for row in rows]
    with pytest.raises(ValueError, match="got 3, expected a divisor of 40 elements"):
        weight_digest(rows, 3)
    with pytest.raises(ValueError, match=r"got torch\.int16, expected one of float32, bfloat16"):
        weight_digest(rows.to(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_have_the_digest_of_their_values(dtype: torch.dtype):
    rows = (20 * torch.randn(4, 10)).to(dtype)
    assert weight_digest(rows, 4) == weight_digest(rows.float(), 4)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3.experts.7"),
        ("model.layers.3.block_sparse_moe.experts.7.w2.weight", "model.layers.3.experts.7"),
        ("model.layers.13.mlp.shared_experts.up_proj.weight", "model.layers.13"),
        ("model.layers.3.self_attn.qkv_proj.weight#kv", "model.layers.3"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_places(name, place):
    assert digest_place(name) == place
