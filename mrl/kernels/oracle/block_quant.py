"""Reference of `mrl.kernels.block_quant`: 8-bit quantisation in plain torch.

The results are defined to the bit, so the arithmetic is fp32 as in the published kernels, and not the
fp64 of the other references. The arguments and results are those of `mrl.kernels.block_quant`, whose
docstrings name the sources of the formulas. Inputs with NaN or infinities are not checked here.

Dimensions: N output channels, K input channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
SMALLEST_AMAX = 1e-10
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_ROUNDS_TO_MAX = 464.0  # the midpoint of 448 and 480, which e4m3fn lacks
INT8_MAX = 127.0


def quantize_fp8_blocks(weight: Tensor, *, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = weight.shape
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK, dtype=torch.float32, device=weight.device)
    padded[:num_rows, :num_columns] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp_min(SMALLEST_AMAX)
    rounded_up = _next_power_of_two(amax.double() / FP8_ROUNDS_TO_MAX)
    scales = rounded_up if powers_of_two else amax / FP8_MAX
    quantized = _to_fp8(blocks * (1.0 / scales))
    is_zero = (quantized.float() == 0).all(dim=3, keepdim=True).all(dim=1, keepdim=True)
    scales = torch.where(is_zero, 1.0, scales)
    quantized = quantized.view(padded.shape)[:num_rows, :num_columns].contiguous()
    return quantized, scales.view(rows, columns)


def dequantize_fp8_blocks(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    num_rows, num_columns = quantized.shape
    of_each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (quantized.float() * of_each[:num_rows, :num_columns]).to(dtype)


def fake_quantize_fp8_groups(x: Tensor, group: int = BLOCK) -> Tensor:
    parts = []
    for part in x.float().split(group, dim=-1):
        scale = _amax(part) / FP8_MAX
        parts.append(_to_fp8(part * (1.0 / scale)).float() * scale)
    return torch.cat(parts, dim=-1).to(x.dtype)


def quantize_int8_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scales = _quantize_int8_rows(weight)
    is_zero = (quantized == 0).all(dim=1, keepdim=True)
    return quantized.to(torch.int8), torch.where(is_zero, 1.0, scales)


def dequantize_int8_channels(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (quantized.float() * scales).to(dtype)


def fake_quantize_int8_tokens(x: Tensor) -> Tensor:
    quantized, scales = _quantize_int8_rows(x)
    return (quantized * scales).to(x.dtype)


def _amax(values: Tensor) -> Tensor:
    """Return max |values| over the last dimension, [..., 1], at least SMALLEST_AMAX; NaN for NaN."""
    return values.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX)


def _to_fp8(values: Tensor) -> Tensor:
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _quantize_int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers of each row, as f32[..., K], and the scales f32[..., 1]."""
    values = x.float()
    amax = _amax(values)
    scaled = values * (torch.full_like(amax, INT8_MAX) / amax)  # 127.0 / amax would round twice
    whole = (scaled.double().abs() + 0.5).floor()  # half away from zero; exact in fp64
    return whole.copysign(scaled.double()).float(), amax / INT8_MAX


def _next_power_of_two(x: Tensor) -> Tensor:
    """Round positive fp64 numbers up to powers of two, as f32."""
    fraction, exponent = torch.frexp(x)  # x = fraction 2^exponent, 1/2 <= fraction < 1
    exponent = exponent - (fraction == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(fraction), exponent).float()
