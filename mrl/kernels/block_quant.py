"""Quantise weights, with one scale per block (fp8) or channel (int8), and layer inputs, with one
scale per group of elements (fp8) or per token (int8)."""

from mrl.kernels.oracle.block_quant import (
    dequantize_fp8_blocks,
    dequantize_int8_channels,
    fake_quantize_fp8_groups,
    fake_quantize_int8_tokens,
    quantize_fp8_blocks,
    quantize_int8_channels,
)

__all__ = [
    "dequantize_fp8_blocks",
    "dequantize_int8_channels",
    "fake_quantize_fp8_groups",
    "fake_quantize_int8_tokens",
    "quantize_fp8_blocks",
    "quantize_int8_channels",
]
