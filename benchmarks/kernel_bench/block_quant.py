"""This module has the cases of `block_quant`: weights [N, K] and activations [tokens, K].

Eager is the oracle, which is what `per_block_cast_to_fp8` and `per_token_quant_int8` compute in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_bench.case import NOT_COMPILED, Case, Outputs, Run, Work, compile_static
from mrl import kernels
from mrl.kernels import oracle

NOTHING = "has no 8-bit quantisation for inference engines"


def fp8_weight(module: Any, x: Tensor) -> Outputs:
    q, scales = module.quantize_fp8_blocks(x, powers_of_two=False)
    return {"q": q.view(torch.uint8), "scales": scales}


def fp8_weight_there_and_back(module: Any, x: Tensor) -> Outputs:
    q, scales = module.quantize_fp8_blocks(x, powers_of_two=True)
    return {"values": module.dequantize_fp8_blocks(q, scales, x.dtype)}


def int8_weight(module: Any, x: Tensor) -> Outputs:
    q, scales = module.quantize_int8_channels(x)
    return {"q": q, "scales": scales}


def fp8_groups(module: Any, x: Tensor) -> Outputs:
    return {"values": module.fake_quantize_fp8_groups(x)}


def int8_tokens(module: Any, x: Tensor) -> Outputs:
    return {"values": module.fake_quantize_int8_tokens(x)}


VARIANTS: dict[str, Callable[..., Outputs]] = {
    "fp8_blocks": fp8_weight,
    "fp8_blocks_there_and_back": fp8_weight_there_and_back,
    "int8_channels": int8_weight,
    "fp8_groups": fp8_groups,
    "int8_tokens": int8_tokens,
}


def build(case: Case, device: torch.device, compile_: bool) -> Work:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(case.shape, generator=rng).to(device, getattr(torch, case.dtype))
    run = VARIANTS[case.variant]
    narrow = case.variant in ("fp8_blocks", "int8_channels")
    compiled: Run | str = NOT_COMPILED
    if compile_:
        compiled_run = compile_static(lambda values: run(oracle, values))
        compiled = lambda: compiled_run(x)  # noqa: E731

    def expected() -> Outputs:
        return {name: value.double() for name, value in run(oracle, x).items()}

    return Work(
        kernel=lambda: run(kernels, x),
        eager=lambda: run(oracle, x),
        expected=expected,
        tolerance=dict.fromkeys(("q", "scales", "values"), 0.0),
        floor_bytes=x.nbytes + (x.numel() if narrow else x.nbytes),
        compiled=compiled,
        liger=f"Liger-Kernel {NOTHING}",
        trl=f"TRL {NOTHING}",
    )


def cases(quick: bool, cuda: bool) -> list[Case]:
    weight, tokens = ((130, 140), (3, 140)) if quick else ((1536, 4096), (512, 4096))
    if cuda and not quick:
        weight, tokens = (7168, 16_384), (8192, 7168)
    rounds = 2 if quick else 15
    return [
        Case(
            "block_quant",
            variant,
            tokens if variant in ("fp8_groups", "int8_tokens") else weight,
            dtype,
            build,
            num_rounds=rounds,
        )
        for variant in VARIANTS
        for dtype in ("bfloat16", "float32")
    ]
