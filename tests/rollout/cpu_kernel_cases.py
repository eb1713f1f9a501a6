"""Inputs of the CPU plug-in's layers, for test_cpu_kernels.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LENGTHS, NEW = (1, 9, 64, 65, 150), (1, 3, 64, 1, 20)


def make_call(extends: bool, dtype: torch.dtype, size: int = 16) -> tuple[Tensor, ...]:
    """Return the tensors of a call, query and output first. Two rows of them only pad the batch."""
    torch.manual_seed(0)
    lengths, new = torch.tensor(LENGTHS), torch.tensor(NEW)
    num_slots, num_queries = int(lengths.sum()), int(new.sum()) if extends else len(new)
    slots = torch.randperm(num_slots).int()
    table = torch.zeros(9, 200, dtype=torch.int32)
    rows = torch.randperm(9)[: len(lengths)]
    for row, part in zip(rows, slots.split(lengths.tolist()), strict=True):
        table[row, : len(part)] = part
    query = torch.randn(num_queries + 2, 6, size).to(dtype)
    k, v = (torch.randn(num_slots, 2, size).to(dtype) for _ in range(2))
    lens = (lengths - new, new) if extends else ()
    return query, torch.zeros_like(query), k, v, table, rows, lengths, *lens


SILU = {
    "activation": "silu",
    "apply_router_weight_on_input": False,
    "gemm1_alpha": None,
    "gemm1_clamp_limit": None,
}
GPT_OSS = {**SILU, "gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.5}


def make_layer(dtype: torch.dtype, *, biased: bool, size: int = 24) -> dict[str, Any]:
    """Return the weights of 5 experts with hidden size 40, as attributes of SGLang's layer."""
    torch.manual_seed(1)
    layer: dict[str, Any] = {
        "num_experts": 5,
        "w13_weight": (torch.randn(5, 2 * size, 40) / 6).to(dtype),
        "w2_weight": (torch.randn(5, 40, size) / 5).to(dtype),
    }
    if biased:
        layer["w13_weight_bias"], layer["w2_weight_bias"] = (
            torch.randn(5, 2 * size),
            torch.randn(5, 40),
        )
    return layer


def make_tokens(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the ids and the weights of 11 tokens with 2 experts each; expert 3 has no token."""
    ids = torch.rand(11, 5).index_fill(1, torch.tensor([3]), -1).topk(2).indices
    return torch.randn(11, 40).to(dtype), ids, torch.rand(11, 2)


NORM = {
    "hidden_size": 40,
    "variance_epsilon": 1e-5,
    "variance_size_override": None,
    "cast_x_before_out_mul": False,
    "fp32_residual": False,
    "override_orig_dtype": None,
}


def make_norm(dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """Return the attributes of SGLang's norm."""
    return {**NORM, "weight": torch.randn(NORM["hidden_size"]).to(dtype), **options}


def make_rope(*, halves: bool = True) -> dict[str, Any]:
    """Return the attributes of SGLang's rotation of 16 of a head's 24 elements."""
    angles = torch.rand(60, 8)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return {"head_size": 24, "rotary_dim": 16, "is_neox_style": halves, "cos_sin_cache": table}
