"""Formats of quantised weights in engines (`rollout.quantization`), and which weights are quantised.

The trainer quantises weights just before it sends them to engines (`mrl.weight_sync.quantize`). It
starts from the weights that its own forward pass uses. Only the matrices of attention, MLPs and
experts are quantised. Router, embeddings, output layer, norms, biases and shared-expert gates keep
the dtype of the export, as in DeepSeek-V3 (arXiv 2412.19437, 3.3). A layer is quantised if the last
part of its name is in MODULES; `mlp.gate`, for example, is not, although `mlp.gate_proj` is.

Dimensions: a weight [N, K] has N outputs and K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from mrl.kernels.block_quant import (
    dequantize_fp8_blocks,
    dequantize_int8_channels,
    fake_quantize_fp8_groups,
    fake_quantize_int8_tokens,
    quantize_fp8_blocks,
    quantize_int8_channels,
)

BLOCK = 128
DTYPES = (torch.float8_e4m3fn, torch.int8)
MODULES = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # latent attention
        *("wq_b", "wk"),  # the indexer of DeepSeek-V3.2
        *("gate_proj", "up_proj", "down_proj"),
        *("w1", "w2", "w3"),  # Mixtral's experts
    }
)
"""The names of the modules whose weights are quantised."""


@dataclass(frozen=True)
class Scheme:
    """One format of quantised weights."""

    name: str
    """The value of `rollout.quantization`."""
    suffix: str
    """The suffix that is appended to a weight's name to get the name of its scales."""
    dtype: torch.dtype
    """The dtype of the quantised weights, which takes one byte per element."""
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Takes a weight [N, K]. Returns the quantised weight [N, K], and its float32 scales of shape
    `scale_shape(N, K)`."""
    dequantize: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    """Takes a quantised weight [N, K], its scales and a dtype. Returns the weight [N, K] in that
    dtype."""
    fake_quantize: Callable[[Tensor], Tensor]
    """Takes the input [..., K] of a layer. Returns the input quantised and dequantised, with the
    rounding errors that the engine's kernels cause on GPUs."""
    scale_shape: Callable[[int, int], tuple[int, int]]
    """Returns the shape of the scales of a weight [N, K], given N and K."""
    relative_error: float
    """Bound on the rounding error of a weight, as a multiple of the weight's absolute value. There is
    also the bound `absolute_error`. The error is at most the larger of the two bounds."""
    absolute_error: float
    """Bound on the rounding error of a weight, as a multiple of the weight's scale. There is also the
    bound `relative_error`. The error is at most the larger of the two bounds."""

    def largest_error(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Return f32[N, K]: the largest possible rounding error of each element of `weight` [N, K]."""
        steps = torch.ones(weight.shape, dtype=torch.float32, device=weight.device).to(self.dtype)
        by_scale = self.dequantize(steps, scales, torch.float32).mul_(self.absolute_error)
        # The division by the scale and the product with it round too.
        return torch.maximum(weight.float().abs() * self.relative_error, by_scale) * (1 + 2.0**-14)


def _per_block(num_outputs: int, num_inputs: int) -> tuple[int, int]:
    return -(-num_outputs // BLOCK), -(-num_inputs // BLOCK)


def _per_channel(num_outputs: int, num_inputs: int) -> tuple[int, int]:
    return num_outputs, 1


def _fp8(name: str, *, powers_of_two: bool) -> Scheme:
    return Scheme(
        name,
        "_scale_inv",
        torch.float8_e4m3fn,
        partial(quantize_fp8_blocks, powers_of_two=powers_of_two),
        dequantize_fp8_blocks,
        fake_quantize_fp8_groups,
        _per_block,
        relative_error=2.0**-4,  # half of the last of three bits of a mantissa
        absolute_error=2.0**-10,  # half of the smallest number
    )


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        _fp8("fp8_block", powers_of_two=False),
        _fp8("fp8_block_ue8m0", powers_of_two=True),
        Scheme(
            "int8",
            "_scale",
            torch.int8,
            quantize_int8_channels,
            dequantize_int8_channels,
            fake_quantize_int8_tokens,
            _per_channel,
            relative_error=0.0,
            absolute_error=0.5,
        ),
    )
}


def is_quantized(name: str, num_dims: int) -> bool:
    """Return whether the weight `name` (in Hugging Face's format) with `num_dims` dimensions is
    quantised."""
    *path, module, leaf = name.split(".")
    return num_dims == 2 and leaf == "weight" and module in MODULES and "layers" in path


def fp8_config(quantization: str, unquantized: Iterable[str] = ()) -> dict[str, Any]:
    """Return the `quantization_config` in the config.json of a model whose weights are stored in fp8
    blocks, as in DeepSeek-V3's checkpoints.

    quantization: `fp8_block` or `fp8_block_ue8m0`. unquantized: the names of linear layers that
    readers of the folder must leave unquantised.
    """
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    if names := sorted(unquantized):
        config["modules_to_not_convert"] = names
    return config | ({"scale_fmt": "ue8m0"} if quantization == "fp8_block_ue8m0" else {})


def quantized_tensors(
    tensors: Iterable[tuple[str, Tensor]], scheme: Scheme
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as pairs (name, tensor). A matrix that is to be quantised (`is_quantized`) is
    replaced by two pairs: the quantised matrix and its scales."""
    for name, tensor in tensors:
        if not is_quantized(name, tensor.dim()):
            yield name, tensor
            continue
        quantized, scales = scheme.quantize(tensor)
        yield name, quantized
        yield name + scheme.suffix, scales


def fake_quantize(scheme: Scheme, name: str, weight: Tensor) -> Tensor:
    """Return the values that an engine uses as the weight `name`, in the dtype of `weight`. A weight
    that is quantised (`is_quantized`) is quantised and dequantised; any other weight is returned
    unchanged."""
    if not is_quantized(name, weight.dim()):
        return weight
    return scheme.dequantize(*scheme.quantize(weight), weight.dtype)


def with_rounding_noise(scheme: Scheme, name: str, weight: Tensor) -> Tensor:
    """Return the weight `name` plus noise that is as large as the format's rounding errors. A weight
    that is not quantised (`is_quantized`) is returned unchanged.

    The noise is uniform between -1 and 1 times `Scheme.largest_error`, and depends on `name` alone.
    Unlike `fake_quantize`, it also changes weights that are exact in the format.
    """
    if not is_quantized(name, weight.dim()):
        return weight
    _, scales = scheme.quantize(weight)
    generator = torch.Generator(weight.device).manual_seed(crc32(name.encode()))
    noise = torch.rand(weight.shape, generator=generator, device=weight.device)
    largest = scheme.largest_error(weight, scales)
    return (weight.float() + (2 * noise - 1) * largest).to(weight.dtype)
