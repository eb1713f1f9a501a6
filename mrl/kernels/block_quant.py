"""Quantise weights in blocks or channels, and layer inputs in groups or tokens."""

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
