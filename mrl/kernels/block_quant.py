"""8-bit quantisation of weights and activations, with the formulas of SGLang's engines.

Weights are quantised into the format of quantised checkpoints. Activations are quantised and
dequantised in one pass, which rounds them exactly like an engine before each product. The results are
defined to the bit: each operation of the formulas below rounds to fp32. No result has a gradient.

`amax` is max |x| over a block, group or row, and at least 1e-10, the bound of SGLang's kernels
(`kernels/ops/quantization/fp8_kernel.py` and `int8_kernel.py` of 0.5.23) and of slime's
(`utils/fp8_kernel.py`).

Dimensions: N output channels, K input channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import backend

BLOCK = 128
"""The number of rows and the number of columns of a block that shares one scale:
`weight_block_size` [128, 128]."""
FP8 = torch.float8_e4m3fn
LIMIT_POWERS_OF_TWO = 248 * 2.0**120
"""Weights of this magnitude or more are refused with power-of-two scales, because the dequantised
value, scale times e4m3, may be infinite in fp32."""


def quantize_fp8_blocks(weight: Tensor, *, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return `weight` as e4m3 in blocks of 128 x 128, and the scales (`weight_scale_inv`).

    For each block, with fp32 operations,

        scale = amax / 448,    q = e4m3(x * (1 / scale)),

    where e4m3 rounds to nearest with ties to even. This is the `per_block_cast_to_fp8` of DeepGEMM,
    and slime's `blockwise_cast_to_fp8_triton`. DeepSeek-V3's own kernel (`inference/kernel.py`)
    divides x by the scale, which gives another q only if x is within fp32 rounding of a tie.

    With `powers_of_two` (DeepSeek's `ue8m0`) the scale is the smallest power of two that is at
    least amax / 464. Values between 448 * scale and 464 * scale become 448 * scale. Published code
    (SGLang's and DeepGEMM's `ceil_to_ue8m0`) rounds amax / 448 up instead, and both give the same
    scale unless a block's amax is in (448, 464] times a power of two. There, the published q of
    amax is 224, and quantising the dequantised block again halves the scale. The formula above has
    no such block: quantising the dequantised weight again, in fp32 or bf16, gives the same bits. If
    amax is at least 1e-4, SGLang's lower bound, the same holds for `requant_weight_ue8m0`, which
    SGLang's loader calls on Blackwell. The dequantised values equal those of the published formula,
    except that values below 2^-5 * scale are rounded less.

    A block whose elements all become 0, such as a block of zeros, has scale 1.

    Args:
        weight: [N, K] in fp32, bf16 or fp16. N and K need not be multiples of 128. The blocks at the
            end are then smaller.
        powers_of_two: whether to round the scales up to powers of two.

    Returns:
        q: float8_e4m3fn[N, K].
        scale_inv: f32[ceil(N / 128), ceil(K / 128)]. The dequantised weight is q * scale_inv.

    Raises:
        ValueError: for a wrong shape or dtype, for NaN or infinity, and with `powers_of_two` for a
            magnitude of 248 * 2^120 (3.3e38) or more, which would be dequantised to infinity. The
            message has the first such position. On a GPU, this check waits for the kernel.
    """
    num_rows, num_columns = _check_matrix("weight", weight)
    weight = weight.contiguous()
    q = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(
        (-(-num_rows // BLOCK), -(-num_columns // BLOCK)), dtype=torch.float32, device=weight.device
    )
    if weight.numel():
        backend.run(
            "quantize_fp8_blocks",
            weight.device,
            x=weight,
            type=backend.FLOAT_TYPES.index(weight.dtype),
            num_rows=num_rows,
            num_columns=num_columns,
            powers_of_two=powers_of_two,
            q=q,
            scales=scales,
        )
        _refuse_unquantizable(weight, scales, LIMIT_POWERS_OF_TWO if powers_of_two else torch.inf)
    return q, scales


def dequantize_fp8_blocks(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return q * scale, [N, K] in `dtype`.

    The product is computed in fp32 and rounded to nearest with ties to even. With power-of-two
    scales of `quantize_fp8_blocks` the product is exact, in fp32 and in bf16. fp16 overflows to
    infinity from 65,520 on.

    Args:
        q: float8_e4m3fn[N, K]. NaN stays NaN.
        scales: f32[ceil(N / 128), ceil(K / 128)].
        dtype: fp32, bf16 or fp16.

    Raises:
        ValueError: for a wrong shape, dtype or device.
    """
    _check_matrix("q", q, (FP8,))
    shape = tuple(-(-size // BLOCK) for size in q.shape)
    return _dequantize("dequantize_fp8_blocks", q, scales, shape, dtype)


def fake_quantize_fp8_groups(x: Tensor, group: int = BLOCK) -> Tensor:
    """Return `x` after quantising it to e4m3 in groups of a row and dequantising it.

    For each group of `group` elements of the last dimension, with fp32 operations,

        scale = amax / 448,    result = e4m3(x * (1 / scale)) * scale,

    and the result is rounded to the dtype of `x`. This is SGLang's `per_token_group_quant_fp8`, the
    dynamic quantisation of activations for weights in blocks, as its Triton kernel
    (`_per_token_group_quant_8bit`) computes it. Its CUDA kernel (`per_token_group_quant.cuh`) computes
    the scale as amax * (1 / 448) and the factor as 448 / amax, so that its scales may differ in the
    last bit. With the formula above, quantising the dequantised fp32 values again gives the same bits.
    With the CUDA kernel's scales it would not.

    Args:
        x: [..., K] in fp32, bf16 or fp16.
        group: the number of elements that share a scale. If it does not divide K, the last group of
            a row is shorter. SGLang's function refuses such a K; DeepGEMM's `per_token_cast_to_fp8`
            pads the row with zeros, which gives the same values.

    Returns:
        [..., K] in the dtype of `x`. A NaN or an infinity makes its whole group NaN.

    Raises:
        ValueError: for a wrong dtype, a tensor without dimensions or a `group` below 1.
    """
    if group < 1:
        raise ValueError(f"group: got {group}, expected at least 1")
    return _fake_quantize("fake_quantize_fp8_groups", x, group=group)


def quantize_int8_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weight` as int8 with a scale per output channel, as SGLang's `w8a8_int8` reads it.

    For each row, with fp32 operations,

        scale = amax / 127,    q = round(x * (127 / amax)),

    where ties round away from zero. This is SGLang's `per_token_quant_int8`, which quantises the
    activations of `w8a8_int8`. SGLang loads int8 weights and has no function that makes them. The
    values of q are -127 to 127. Quantising the dequantised fp32 weight again gives the same bits.

    A row whose elements all become 0, such as a row of zeros, has scale 1.

    Args:
        weight: [N, K] in fp32, bf16 or fp16.

    Returns:
        q: int8[N, K].
        scales: f32[N, 1].

    Raises:
        ValueError: for a wrong shape or dtype, and for NaN or infinity; the message then has the
            first position. On a GPU, this check waits for the kernel.
    """
    num_rows, num_columns = _check_matrix("weight", weight)
    weight = weight.contiguous()
    q = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.ones((num_rows, 1), dtype=torch.float32, device=weight.device)
    if weight.numel():
        backend.run(
            "quantize_int8_rows",
            weight.device,
            x=weight,
            type=backend.FLOAT_TYPES.index(weight.dtype),
            num_rows=num_rows,
            num_columns=num_columns,
            q=q,
            scales=scales,
        )
        _refuse_unquantizable(weight, scales, torch.inf)
    return q, scales


def dequantize_int8_channels(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return q * scale, [N, K] in `dtype`, computed in fp32 and rounded once, with ties to even.

    Args:
        q: int8[N, K].
        scales: f32[N, 1].
        dtype: fp32, bf16 or fp16.

    Raises:
        ValueError: for a wrong shape, dtype or device.
    """
    num_rows, _ = _check_matrix("q", q, (torch.int8,))
    return _dequantize("dequantize_int8_rows", q, scales, (num_rows, 1), dtype)


def fake_quantize_int8_tokens(x: Tensor) -> Tensor:
    """Return `x` after quantising each token to int8 and dequantising it.

    For each row of the last dimension, with fp32 operations,

        scale = amax / 127,    result = round(x * (127 / amax)) * scale,

    where ties round away from zero, and the result is rounded to the dtype of `x`. This is SGLang's
    `per_token_quant_int8`, the dynamic quantisation of activations under `w8a8_int8`.

    Args:
        x: [..., K] in fp32, bf16 or fp16.

    Returns:
        [..., K] in the dtype of `x`. A NaN or an infinity makes its whole row NaN.

    Raises:
        ValueError: for a wrong dtype or a tensor without dimensions.
    """
    return _fake_quantize("fake_quantize_int8_rows", x)


def _check_matrix(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = backend.FLOAT_TYPES
) -> tuple[int, int]:
    """Return (N, K). Raises ValueError if `tensor` is no matrix, or has another dtype."""
    if tensor.dim() != 2:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected [N, K]")
    num_rows, num_columns = tensor.shape
    legend = f"N = {num_rows}, K = {num_columns}"
    backend.check_tensor(name, tensor, (num_rows, num_columns), dtypes, tensor.device, legend)
    return num_rows, num_columns


def _refuse_unquantizable(weight: Tensor, scales: Tensor, limit: float) -> None:
    """Raise ValueError if the kernel has returned a NaN among the scales. The message names the
    first weight whose magnitude is not below `limit`."""
    if not bool(scales.isnan().any()):
        return
    row, column = (~(weight.float().abs() < limit)).nonzero()[0].tolist()
    wanted = "finite weights" if limit == torch.inf else f"weights of less than {limit:.4g}"
    raise ValueError(
        f"weight: got {weight[row, column].item()} at [{row}, {column}] of {list(weight.shape)}, the "
        f"first that cannot be quantised, expected {wanted}"
    )


def _dequantize(
    kernel: str, q: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if dtype not in backend.FLOAT_TYPES:
        raise ValueError(f"dtype: got {dtype}, expected one of {list(backend.FLOAT_TYPES)}")
    num_rows, num_columns = q.shape
    legend = f"N = {num_rows}, K = {num_columns}"
    backend.check_tensor("scales", scales, shape, (torch.float32,), q.device, legend)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    if q.numel():
        backend.run(
            kernel,
            q.device,
            q=q.contiguous(),
            scales=scales.contiguous(),
            num_rows=num_rows,
            num_columns=num_columns,
            type=backend.FLOAT_TYPES.index(dtype),
            out=out,
        )
    return out


def _fake_quantize(kernel: str, x: Tensor, **arguments: int) -> Tensor:
    if not x.dim() or x.dtype not in backend.FLOAT_TYPES:
        raise ValueError(
            f"x: got shape {list(x.shape)} of {x.dtype}, expected [..., K] of one of "
            f"{list(backend.FLOAT_TYPES)}"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        backend.run(
            kernel,
            x.device,
            x=x.contiguous(),
            type=backend.FLOAT_TYPES.index(x.dtype),
            num_rows=x.numel() // x.shape[-1],
            num_columns=x.shape[-1],
            **arguments,
            out=out,
        )
    return out
