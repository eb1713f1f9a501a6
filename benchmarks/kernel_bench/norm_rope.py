"""This module has the cases of `rms_norm` (T tokens, h heads, d elements) and of `rotate` (T tokens,
h query heads, g key heads, d head size). Eager is what SGLang does on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.kernel_bench.case import Case, Outputs, Work
from mrl.kernels import oracle, rms_norm, rotate

NOTHING = "is for training"
NOT_COMPILED = "SGLang runs it eagerly on CPUs: left out"
POSITIONS, EPS = 512, 1e-6


def norm_eagerly(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Add and normalise as SGLang's RMSNorm.forward_native does."""
    rows = x.float() + residual.float()
    scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + EPS)
    return (rows * scale * weight).to(x.dtype), rows.to(x.dtype)


def build_norm(case: Case, device: torch.device, compile_: bool) -> Work:
    num_tokens, heads, size = case.shape
    rng, dtype = torch.Generator().manual_seed(0), getattr(torch, case.dtype)
    x, residual = (torch.randn(num_tokens, heads, size, generator=rng).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=rng).to(dtype)

    def named(out: Tensor, added: Tensor | None) -> Outputs:
        assert added is not None
        return {"out": out, "sum": added}

    return Work(
        kernel=lambda: named(*rms_norm(x, weight, EPS, residual)),
        eager=lambda: named(*norm_eagerly(x, weight, residual)),
        expected=lambda: named(*oracle.rms_norm(x, weight, EPS, residual)),
        tolerance=dict.fromkeys(("out", "sum"), 1e-5 if case.dtype == "float32" else 2e-2),
        floor_bytes=4 * x.nbytes,
        compiled=NOT_COMPILED,
        liger=f"Liger-Kernel {NOTHING}",
        trl=f"TRL {NOTHING}",
    )


def rotate_eagerly(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, size: int
) -> Outputs:
    """Rotate halves as SGLang's RotaryEmbedding.forward_native does."""
    cos, sin = cos_sin.index_select(0, positions).chunk(2, -1)
    cos, sin = (each.unsqueeze(-2).to(query.dtype) for each in (cos, sin))
    results = {}
    for name, tensor in (("query", query), ("key", key)):
        first, second = tensor.reshape(len(tensor), -1, size).chunk(2, -1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        results[name] = torch.cat(pair, -1).reshape(tensor.shape)
    return results


def build_rotate(case: Case, device: torch.device, compile_: bool) -> Work:
    num_tokens, heads, groups, size = case.shape
    rng, dtype = torch.Generator().manual_seed(0), getattr(torch, case.dtype)
    query, key = (
        torch.randn(num_tokens, n * size, generator=rng).to(dtype) for n in (heads, groups)
    )
    positions = torch.randint(0, POSITIONS, (num_tokens,), generator=rng)
    angles = torch.rand(POSITIONS, size // 2, generator=rng)
    given = (query, key, positions, torch.cat((angles.cos(), angles.sin()), -1), size)

    def named(query: Tensor, key: Tensor) -> Outputs:
        return {"query": query, "key": key}

    return Work(
        kernel=lambda: named(*rotate(*given, halves=True)),
        eager=lambda: rotate_eagerly(*given),
        expected=lambda: named(*oracle.rotate(*given, halves=True)),
        tolerance=dict.fromkeys(("query", "key"), 1e-5 if case.dtype == "float32" else 4e-2),
        floor_bytes=2 * (query.nbytes + key.nbytes),
        compiled=NOT_COMPILED,
        liger=f"Liger-Kernel {NOTHING}",
        trl=f"TRL {NOTHING}",
    )


def cases(quick: bool, cuda: bool) -> list[Case]:
    """Cases of the toy model and of SmolLM2-135M; CPUs only."""
    if cuda:
        return []
    norms, rotations = [(3, 2, 16)], [(3, 2, 1, 16)]
    if not quick:
        norms = [(128, 1, 64), (128, 4, 16), (1024, 4, 16), (32, 1, 576), (512, 1, 576)]
        rotations = [(128, 4, 2, 16), (1024, 4, 2, 16), (32, 9, 3, 64), (512, 9, 3, 64)]
    made = [("rms_norm", "with a residual", shape, build_norm) for shape in norms]
    made += [("rotate", "halves", shape, build_rotate) for shape in rotations]
    return [
        Case(name, variant, shape, dtype, build, num_rounds=2 if quick else 15)
        for name, variant, shape, build in made
        for dtype in ("float32", "bfloat16")
    ]
