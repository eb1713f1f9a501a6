"""Reference implementations of `mrl.kernels.block_quant` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0


def fp8_block_scales(weight: Tensor, *, powers_of_two: bool) -> Tensor:
    """Return f32[ceil(N/128), ceil(K/128)]: the scale of each 128 x 128 block of `weight` [N, K]."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK, dtype=torch.float32, device=weight.device)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    largest = padded.view(rows, BLOCK, columns, BLOCK).abs().amax(dim=(1, 3))
    scales = (largest / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.where(largest == 0, 1.0, scales)
    return _next_power_of_two(scales) if powers_of_two else scales


def quantize_fp8_blocks(weight: Tensor, *, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    scales = fp8_block_scales(weight, powers_of_two=powers_of_two)
    scaled = weight.float() / _spread(scales, weight.shape)
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def dequantize_fp8_blocks(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (quantized.float() * _spread(scales, quantized.shape)).to(dtype)


def fake_quantize_fp8_groups(x: Tensor, group: int = BLOCK) -> Tensor:
    groups = x.float().split(group, dim=-1)
    out = []
    for part in groups:
        scale = part.abs().amax(-1, keepdim=True).clamp_min(1e-10) / FP8_MAX
        out.append((part / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale)
    return torch.cat(out, dim=-1).to(x.dtype)


def quantize_int8_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    values = weight.float()
    largest = values.abs().amax(1, keepdim=True)
    scales = (largest / INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.where(largest == 0, 1.0, scales)
    return (values / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales


def dequantize_int8_channels(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (quantized.float() * scales).to(dtype)


def fake_quantize_int8_tokens(x: Tensor) -> Tensor:
    values = x.float()
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-10) / INT8_MAX
    return ((values / scale).round().clamp(-INT8_MAX, INT8_MAX) * scale).to(x.dtype)


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Return the scale of each element, f32[N, K]."""
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return whole[: shape[0], : shape[1]]


def _next_power_of_two(x: Tensor) -> Tensor:
    """Round positive normal float32 numbers up to powers of two."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)
