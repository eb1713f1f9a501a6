"""8-bit quantisation: zeros, what is not finite, shapes, bad arguments, and the CUDA source."""

from __future__ import annotations

import pytest
import torch
from emulator import ORDERS

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

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("flush", [False, True])
def test_blocks_that_become_zero_have_scale_1(powers_of_two: bool, flush: bool) -> None:
    """Zeros of either sign, denormals, and values of less than 2^-10 of the smallest scale."""
    for value in (0.0, -0.0, 2.0**-149, -(2.0**-130), 2e-16):
        x = torch.full((129, 3), value)
        torch.set_flush_denormal(flush)
        try:
            q, scales = quantize_fp8_blocks(x, powers_of_two=powers_of_two)
            int8, channel_scales = quantize_int8_channels(x)
        finally:
            torch.set_flush_denormal(False)
        assert not q.float().any()
        assert scales.tolist() == [[1.0], [1.0]]
        assert not int8.any()
        assert (channel_scales == 1).all()
    for value in (3e-16, 1e-10):
        q, scales = quantize_fp8_blocks(torch.full((1, 1), value), powers_of_two=powers_of_two)
        assert q.float().item() > 0
        assert 2e-13 < scales.item() < 5e-13


def test_a_nan_or_an_infinity_makes_its_group_nan() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for dtype in DTYPES:
            x = make("normal", (3, 300), dtype, 0)
            x[1, 140] = bad
            got = fake_quantize_fp8_groups(x)
            assert got.isnan().nonzero().tolist() == [[1, i] for i in range(128, 256)]
            assert_bits(got, oracle.fake_quantize_fp8_groups(x))
            got = fake_quantize_int8_tokens(x)
            assert torch.equal(got.isnan().all(1), torch.tensor([False, True, False]))
            assert_bits(got, oracle.fake_quantize_int8_tokens(x))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_refused_with_its_position(bad: float) -> None:
    for dtype in DTYPES:
        x = make("normal", (300, 150), dtype, 0)
        x[140, 129] = x[290, 3] = bad
        says = rf"weight: got {bad} at \[140, 129\] of \[300, 150\], .* expected finite weights"
        with pytest.raises(ValueError, match=says):
            quantize_fp8_blocks(x, powers_of_two=False)
        with pytest.raises(ValueError, match=r"at \[140, 129\]"):
            quantize_fp8_blocks(x, powers_of_two=True)
        with pytest.raises(ValueError, match=says):
            quantize_int8_channels(x)


def test_the_limit_of_powers_of_two() -> None:
    limit = 248 * 2.0**120
    below = torch.tensor([[0.0, -limit]]).nextafter(torch.zeros(1))
    q, scales = quantize_fp8_blocks(below, powers_of_two=True)
    assert dequantize_fp8_blocks(q, scales, torch.float32)[0, 1] == -240 * 2.0**120
    with pytest.raises(ValueError, match=r"got -3.29\S+ at \[0, 1\] .* less than 3.296e\+38"):
        quantize_fp8_blocks(torch.tensor([[0.0, -limit]]), powers_of_two=True)
    largest = torch.full((2, 2), torch.finfo(torch.float32).max)
    q, scales = quantize_fp8_blocks(largest, powers_of_two=False)
    assert torch.equal(dequantize_fp8_blocks(q, scales, torch.float32), largest)


def test_shapes_and_strides() -> None:
    x = make("normal", (2, 5, 7, 200), torch.bfloat16, 0)
    flat = x.reshape(-1, 200)
    for run in (fake_quantize_fp8_groups, fake_quantize_int8_tokens):
        assert torch.equal(run(x).reshape(-1, 200), run(flat))
        assert torch.equal(run(x[:, 1, ::2]), run(x)[:, 1, ::2])
        assert torch.equal(run(x[0, 0, 0]), run(flat)[0])
        assert run(x[:0]).shape == (0, 5, 7, 200)
        assert run(x[..., :0]).shape == (2, 5, 7, 0)
    q, scales = quantize_fp8_blocks(flat.T, powers_of_two=True)
    assert scales.shape == (2, 1)
    assert torch.equal(
        q.float(), quantize_fp8_blocks(flat.T.clone(), powers_of_two=True)[0].float()
    )
    back = dequantize_fp8_blocks(q.T, scales.T, torch.bfloat16)
    assert torch.equal(back, dequantize_fp8_blocks(q, scales, torch.bfloat16).T)
    for shape in ((0, 5), (5, 0), (0, 0)):
        empty = torch.empty(shape)
        q, scales = quantize_fp8_blocks(empty, powers_of_two=False)
        assert q.shape == dequantize_fp8_blocks(q, scales, torch.float16).shape == shape
        q, scales = quantize_int8_channels(empty)
        assert q.shape == dequantize_int8_channels(q, scales, torch.float16).shape == shape
        assert torch.equal(scales, torch.ones(shape[0], 1))


@pytest.mark.parametrize(("order", "dtype"), list(zip(ORDERS, DTYPES, strict=True)), ids=str)
def test_the_cuda_kernels_have_the_bits_of_the_oracle(emulated_cuda, order, dtype) -> None:
    """(129, 12) is read in fours, (3, 131) one by one, and (1, 1030) takes two CTAs a row."""
    with emulated_cuda(order):
        check_all(make("blocks", (129, 12), dtype, 0), powers_of_two=False, group=128)
        check_all(make("e4m3", (3, 131), dtype, 1), powers_of_two=True, group=50)
        check_all(make("denormal", (1, 1030), dtype, 2), powers_of_two=True, group=128)


@pytest.mark.release  # 2 minutes in the emulator
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cuda_kernels_with_every_kind_of_values(emulated_cuda, order, dtype) -> None:
    for number, shape in enumerate(((130, 132), (140, 131), (3, 1030))):
        for kind in ("normal", "blocks") if number else KINDS:
            x = make(kind, shape, dtype, number)
            with emulated_cuda(order):
                check_all(x, powers_of_two=number == 1, group=(128, 50, 128)[number])


def test_the_cuda_kernels_see_what_is_not_finite(emulated_cuda) -> None:
    x = make("normal", (3, 140), torch.bfloat16, 0)
    x[2, 137] = torch.nan
    with emulated_cuda():
        for run in (fake_quantize_fp8_groups, fake_quantize_int8_tokens):
            assert torch.equal(run(x).isnan().any(1).nonzero(), torch.tensor([[2]]))
        with pytest.raises(ValueError, match=r"got nan at \[2, 137\]"):
            quantize_fp8_blocks(x, powers_of_two=True)
        with pytest.raises(ValueError, match=r"got nan at \[2, 137\]"):
            quantize_int8_channels(x)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (
            lambda: quantize_fp8_blocks(torch.ones(3), powers_of_two=True),
            r"shape \[3\], .* \[N, K\]",
        ),
        (lambda: quantize_int8_channels(torch.ones(2, 2).double()), "weight: got dtype .*float64"),
        (
            lambda: dequantize_fp8_blocks(
                torch.zeros(2, 129).to(FP8), torch.ones(1, 1), torch.float32
            ),
            r"scales: got shape \[1, 1\], expected \[1, 2\] \(N = 2, K = 129\)",
        ),
        (
            lambda: dequantize_fp8_blocks(torch.ones(2, 2), torch.ones(1, 1), torch.float32),
            "q: got dtype torch.float32, expected torch.float8_e4m3fn",
        ),
        (
            lambda: dequantize_int8_channels(
                torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1), torch.int8
            ),
            "dtype: got torch.int8",
        ),
        (lambda: fake_quantize_fp8_groups(torch.ones(2), group=0), "group: got 0"),
        (lambda: fake_quantize_int8_tokens(torch.tensor(1.0)), r"x: got shape \[\]"),
        (lambda: fake_quantize_fp8_groups(torch.ones(2).int()), "x: got .* of torch.int32"),
    ],
)
def test_bad_arguments_are_named(run, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run()
