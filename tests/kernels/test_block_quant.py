"""8-bit quantisation: the bits of the oracle, of SGLang, and of quantising a second time."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.kernels import (
    dequantize_fp8_blocks,
    dequantize_int8_channels,
    fake_quantize_fp8_groups,
    fake_quantize_int8_tokens,
    oracle,
    quantize_fp8_blocks,
    quantize_int8_channels,
)
from tests.kernels.block_quant_cases import DTYPES, KINDS, assert_bits, check_all, make
from tests.kernels.threads import kernel_threads

FP8 = torch.float8_e4m3fn
SIZES = st.integers(1, 300) | st.sampled_from([31, 32, 33, 127, 128, 129, 256])


@given(
    rows=SIZES, columns=SIZES, dtype=st.sampled_from(DTYPES), kind=st.sampled_from(KINDS),
    powers_of_two=st.booleans(), group=st.sampled_from([128, 64, 1, 5, 1000]),
    seed=st.integers(0, 2**31), threads=st.integers(1, 2),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_bits_are_those_of_the_oracle(
    rows: int, columns: int, dtype: torch.dtype, kind: str, powers_of_two: bool, group: int,
    seed: int, threads: int,
) -> None:  # fmt: skip
    with kernel_threads(threads):
        check_all(make(kind, (rows, columns), dtype, seed), powers_of_two, group)


@given(
    rows=SIZES, columns=SIZES, dtype=st.sampled_from(DTYPES), kind=st.sampled_from(KINDS),
    powers_of_two=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_second_quantisation_gives_the_same_bits(
    rows: int, columns: int, dtype: torch.dtype, kind: str, powers_of_two: bool, seed: int
) -> None:
    x = make(kind, (rows, columns), dtype, seed)
    q, scales = quantize_fp8_blocks(x, powers_of_two=powers_of_two)
    wide = dequantize_fp8_blocks(q, scales, torch.float32)
    assert wide.isfinite().all()
    again, scales_again = quantize_fp8_blocks(wide, powers_of_two=powers_of_two)
    assert torch.equal(again.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(scales_again, scales)
    if powers_of_two:
        assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
        narrow = dequantize_fp8_blocks(q, scales, torch.bfloat16)
        assert_bits(narrow.float(), wide)

    int8, channel_scales = quantize_int8_channels(x)
    wide = dequantize_int8_channels(int8, channel_scales, torch.float32)
    int8_again, channel_scales_again = quantize_int8_channels(wide)
    assert torch.equal(int8_again, int8)
    assert torch.equal(channel_scales_again, channel_scales)

    once = fake_quantize_fp8_groups(x.float())
    assert_bits(fake_quantize_fp8_groups(once), once)
    once = fake_quantize_int8_tokens(x.float())
    assert_bits(fake_quantize_int8_tokens(once), once)


def test_scales_of_a_million_values_survive() -> None:
    """One value a row: the scales of `amax / 448` and `amax / 127` for many significands."""
    rng = torch.Generator().manual_seed(0)
    bits = torch.randint(0x3F000000, 0x40000000, (1_000_000, 1), generator=rng).int()
    x = bits.view(torch.float32)
    once = fake_quantize_fp8_groups(x)
    assert torch.equal(fake_quantize_fp8_groups(once), once)
    q, scales = quantize_int8_channels(x)
    again, scales_again = quantize_int8_channels(dequantize_int8_channels(q, scales, torch.float32))
    assert torch.equal(again, q)
    assert torch.equal(scales_again, scales)


def sglang_functions(file: str, *names: str) -> dict[str, Any]:
    """Return functions of the installed SGLang, from their text: the modules need Triton."""
    path = importlib.metadata.distribution("sglang").locate_file(f"sglang/{file}")
    tree = ast.parse(Path(str(path)).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") in names]
    assert len(tree.body) == len(names)
    found: dict[str, Any] = {"torch": torch, "Tuple": tuple, "List": list}
    found["ceil_align"] = lambda size, by: -(-size // by) * by
    exec(compile(tree, file, "exec"), found)
    return found


def test_powers_of_two_survive_sglangs_own_quantisation() -> None:
    """SGLang's loader quantises once more on Blackwell. Values and bits, for amax from 1 to 2."""
    file = "srt/layers/quantization/fp8_utils.py"
    names = ("per_block_cast_to_fp8", "ceil_to_ue8m0", "block_quant_dequant")
    sglang = sglang_functions(file, *names)
    rng = torch.Generator().manual_seed(2)
    size = 1 + torch.arange(256).repeat_interleave(128)[:, None] / 256
    x = torch.rand(len(size), 200, generator=rng) * 2 - 1
    x[::128, ::128] = 1
    x = (x * size).bfloat16()
    q, scales = quantize_fp8_blocks(x, powers_of_two=True)
    plain = dequantize_fp8_blocks(q, scales, torch.bfloat16)
    assert torch.equal(plain, sglang["block_quant_dequant"](q, scales, [128, 128], torch.bfloat16))
    again, scales_again = sglang["per_block_cast_to_fp8"](plain)
    assert torch.equal(again.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(scales_again, scales)

    # SGLang's quantisation of the weights themselves: another scale for amax in (448, 464] s alone.
    theirs, their_scales = sglang["per_block_cast_to_fp8"](x)
    other = scales != their_scales
    amax = x.view(256, 128, 200).abs().amax(1)[:, [0, 128]].float()
    assert torch.equal(other, (amax > 448 * scales) & (amax <= 464 * scales))
    assert 0 < other.sum() < other.numel() / 10
    assert torch.equal(their_scales[other], 2 * scales[other])
    values = sglang["block_quant_dequant"](theirs, their_scales, [128, 128], torch.bfloat16)
    small = x.abs() < (scales.repeat_interleave(128, 0).repeat_interleave(128, 1) / 32)[:, :200]
    assert torch.equal(plain[~small], values[~small])
    errors = [(y - x).abs().float()[small] for y in (plain, values)]
    assert (errors[0] <= errors[1]).all()
    # Why the published scale was not taken: theirs changes when SGLang quantises a second time.
    _, twice = sglang["per_block_cast_to_fp8"](values)
    assert torch.equal(twice, scales)


def test_int8_is_sglangs_formula() -> None:
    """Its reference for CPUs rounds ties to even; random float32 values have none."""
    sglang = sglang_functions("test/cpu_test_utils.py", "per_token_quant_int8")
    x = make("blocks", (50, 300), torch.float32, 4)
    x[3] *= 1e-12
    q, scales = sglang["per_token_quant_int8"](x)
    got, got_scales = quantize_int8_channels(x)
    assert torch.equal(got, q)
    assert_bits(got_scales[q.any(1)], scales[q.any(1)])
    assert (got_scales[~q.any(1)] == 1).all()
    assert torch.equal(fake_quantize_int8_tokens(x), q * scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rounding_to_e4m3(dtype: torch.dtype) -> None:
    """Under scale 1: every bf16 number up to 448; all neighbours of ties in fp32."""
    if dtype == torch.bfloat16:
        bits = torch.arange(0, 0x43E1, dtype=torch.int16)
        values = bits.view(torch.bfloat16)
    else:
        numbers = torch.arange(0, 0x7F, dtype=torch.uint8).view(FP8).float()
        ties = (numbers[1:] + numbers[:-1]) / 2
        steps = torch.arange(-3, 4, dtype=torch.int32)
        around = torch.cat([numbers[1:], ties]).view(torch.int32)[:, None] + steps
        values = around.flatten().view(torch.float32).clamp(max=448)
    values = torch.cat([values, -values])
    rows = -(-len(values) // 127)
    x = torch.full((rows, 128), 448.0, dtype=dtype)
    padded = torch.zeros(rows * 127, dtype=dtype)
    padded[: len(values)] = values
    x[:, 1:] = padded.view(rows, 127)
    q, scales = quantize_fp8_blocks(x, powers_of_two=False)
    assert (scales == 1).all()
    assert torch.equal(q.view(torch.uint8), x.to(FP8).view(torch.uint8))
    assert_bits(fake_quantize_fp8_groups(x), x.to(FP8).to(dtype))


def test_every_byte_is_dequantised() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(130, 1)
    scales = 2.0 ** torch.tensor([[-140.0, 3], [0, 119]])
    for dtype in DTYPES:
        got = dequantize_fp8_blocks(codes.view(FP8), scales, dtype)
        assert_bits(got, oracle.dequantize_fp8_blocks(codes.view(FP8), scales, dtype))
        rows = torch.rand(130, 1, generator=torch.Generator().manual_seed(0)) * 1000
        got = dequantize_int8_channels(codes.view(torch.int8), rows, dtype)
        assert_bits(got, oracle.dequantize_int8_channels(codes.view(torch.int8), rows, dtype))


def test_int8_ties_go_away_from_zero() -> None:
    x = torch.tensor([[127, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, -126.5, 126.49999, 0.0]])
    q, scales = quantize_int8_channels(x)
    assert q.tolist() == [[127, 1, -1, 2, 3, -3, 0, -127, 126, 0]]
    assert scales.tolist() == [[1.0]]


WITHOUT_TORCH = """
import hashlib
import numpy as np
from mrl import _C
rng = np.random.default_rng(0)
rows, columns = 140, 131
shape = {"num_rows": rows, "num_columns": columns, "num_threads": 1}
at = lambda x: x.ctypes.data
digest = hashlib.sha256()
normal = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-20, 10, (rows, columns))
for type, x in enumerate((normal.astype("f4"), (normal.astype("f4").view("u4") >> 16).astype("u2"),
                          normal.astype("f2"))):
    for powers_of_two in (False, True):
        q, scales, out = np.zeros((rows, columns), "u1"), np.zeros((2, 2), "f4"), np.zeros_like(x)
        _C.quantize_fp8_blocks_cpu(x=at(x), type=type, powers_of_two=powers_of_two, q=at(q),
                                   scales=at(scales), **shape)
        _C.dequantize_fp8_blocks_cpu(q=at(q), scales=at(scales), type=type, out=at(out), **shape)
        for made in (q, scales, out):
            digest.update(made.tobytes())
    scales = np.zeros(rows, "f4")
    _C.quantize_int8_rows_cpu(x=at(x), type=type, q=at(q), scales=at(scales), **shape)
    _C.dequantize_int8_rows_cpu(q=at(q), scales=at(scales), type=type, out=at(out), **shape)
    fakes = np.zeros_like(x), np.zeros_like(x)
    _C.fake_quantize_fp8_groups_cpu(x=at(x), type=type, group=100, out=at(fakes[0]), **shape)
    _C.fake_quantize_int8_rows_cpu(x=at(x), type=type, out=at(fakes[1]), **shape)
    for made in (q, scales, out, *fakes):
        digest.update(made.tobytes())
print(digest.hexdigest())
"""
"""It chooses the instruction set once a process; torch would take seconds to import."""


def test_every_instruction_set_gives_the_same() -> None:
    printed = set()
    for target in ("narrow", "medium", "wide"):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH],
            env={"MRL_CPU_TARGET": target, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=False,
        )
        if "one that this processor has" not in done.stderr:
            assert done.returncode == 0, done.stderr
            printed.add(done.stdout)
    assert len(printed) == 1
