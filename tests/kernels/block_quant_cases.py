"""Values to quantise, and the comparison with the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import (
    dequantize_fp8_blocks,
    dequantize_int8_channels,
    fake_quantize_fp8_groups,
    fake_quantize_int8_tokens,
    oracle,
    quantize_fp8_blocks,
    quantize_int8_channels,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("normal", "blocks", "sparse", "denormal", "huge", "e4m3", "zero")


def make(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return finite values [..., K] of one kind; those of float32 have random low bits."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=rng)
    top = min(torch.finfo(dtype).max, 248 * 2.0**120 * (1 - 2.0**-8))
    if kind == "blocks":  # every part of a row has a size of its own, from 1e-13 to 1e13
        size = torch.randint(-13, 14, (*shape[:-1], -(-shape[-1] // 32)), generator=rng)
        x *= (10.0**size).repeat_interleave(32, -1)[..., : shape[-1]]
    elif kind == "sparse":
        x *= torch.rand(shape, generator=rng) < 0.02
    elif kind == "denormal":
        x *= torch.finfo(dtype).tiny
    elif kind == "huge":
        x = (x / 4).clamp(-1, 1) * top
    elif kind == "e4m3":  # ties of e4m3 and of int8 under simple scales
        x = torch.randint(-928, 929, shape, generator=rng) / 2
    elif kind == "zero":
        x.zero_()
    return x.clamp(-top, top).to(dtype)


def assert_bits(got: Tensor, expected: Tensor) -> None:
    """The same bytes, or NaN on both sides."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if got.dtype != torch.int8:
        assert torch.equal(got.isnan(), expected.isnan())
        got, expected = (x.float().nan_to_num(nan=0.0) for x in (got, expected))
        got, expected = (x.contiguous().view(torch.int32) for x in (got, expected))
    assert torch.equal(got, expected)


def check_all(x: Tensor, powers_of_two: bool, group: int) -> list[Tensor]:
    """Compare every function of `x` [N, K] with its oracle; return the results."""
    made = quantize_fp8_blocks(x, powers_of_two=powers_of_two)
    expected = oracle.quantize_fp8_blocks(x, powers_of_two=powers_of_two)
    int8, expected_int8 = quantize_int8_channels(x), oracle.quantize_int8_channels(x)
    pairs = [*zip(made, expected, strict=True), *zip(int8, expected_int8, strict=True)]
    for dtype in DTYPES:
        pairs += [
            (dequantize_fp8_blocks(*made, dtype), oracle.dequantize_fp8_blocks(*made, dtype)),
            (dequantize_int8_channels(*int8, dtype), oracle.dequantize_int8_channels(*int8, dtype)),
        ]
    pairs += [
        (fake_quantize_fp8_groups(x, group), oracle.fake_quantize_fp8_groups(x, group)),
        (fake_quantize_int8_tokens(x), oracle.fake_quantize_int8_tokens(x)),
    ]
    for got, wanted in pairs:
        assert_bits(got, wanted)
    return [got for got, _ in pairs]
