"""This module has the cases of `fused_experts`: T tokens, H hidden size, I size of an expert, E
experts, k of each token.

Eager is what SGLang does on CPUs: it sorts the tokens by expert, and a loop in Python calls two
products and the activation for each expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_bench.case import Case, Outputs, Work
from mrl.kernels import fused_experts, oracle

NOTHING = "has no inference kernel for experts"
NOT_COMPILED = "torch.compile cannot trace a loop over counts that are data: left out"
Layer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make_layer(case: Case) -> Layer:
    """Make x [T, H], w13 [E, 2I, H], w2 [E, H, I], ids [T, k] and weights [T, k]."""
    num_tokens, hidden, size, num_experts, top_k = case.shape
    rng, dtype = torch.Generator().manual_seed(0), getattr(torch, case.dtype)
    x = torch.randn(num_tokens, hidden, generator=rng)
    w13 = torch.randn(num_experts, 2 * size, hidden, generator=rng) * hidden**-0.5
    w2 = torch.randn(num_experts, hidden, size, generator=rng) * size**-0.5
    ids = torch.rand(num_tokens, num_experts, generator=rng).topk(top_k).indices
    weights = torch.rand(num_tokens, top_k, generator=rng)
    return x.to(dtype), w13.to(dtype), w2.to(dtype), ids, weights


def loop(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute one expert after the other, as SGLang does."""
    counts = ids.new_zeros(len(ids), len(w13))
    counts.scatter_(1, ids, 1)
    order = ids.reshape(-1).argsort()
    inputs, outputs, start = x[order // ids.shape[1]], [], 0
    for expert, count in enumerate(counts.sum(0).tolist()):
        if count:
            gate, up = F.linear(inputs[start : start + count], w13[expert]).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up, w2[expert]))
            start += count
    joined = torch.cat(outputs)
    in_order = torch.empty_like(joined)
    in_order[order] = joined
    weighted = in_order.view(*ids.shape, -1).float() * weights.unsqueeze(-1)
    return weighted.sum(1).to(x.dtype)


def build(case: Case, device: torch.device, compile_: bool) -> Work:
    layer = make_layer(case)

    def expected() -> Outputs:
        return {"out": oracle.fused_experts(*layer)}

    return Work(
        kernel=lambda: {"out": fused_experts(*layer)},
        eager=lambda: {"out": loop(*layer)},
        expected=expected,
        tolerance={"out": 1e-5 if case.dtype == "float32" else 5e-2},
        # Every weight and input is read once and the output written.
        floor_bytes=layer[1].nbytes + layer[2].nbytes + 2 * layer[0].nbytes,
        compiled=NOT_COMPILED,
        liger=f"Liger-Kernel {NOTHING}",
        trl=f"TRL {NOTHING}",
    )


def cases(quick: bool, cuda: bool) -> list[Case]:
    """Cases of the toy model, of SmolLM2-135M as 4 experts, and of 64 small experts; CPUs only."""
    if cuda:
        return []
    shapes = [(3, 16, 8, 4, 2)]
    if not quick:
        shapes = [
            (128, 64, 32, 8, 2), (1024, 64, 32, 8, 2), (32, 576, 1536, 4, 2), (256, 576, 1536, 4, 2),
            (32, 512, 256, 64, 8),
        ]  # fmt: skip
    return [
        Case("fused_experts", "swiglu", shape, dtype, build, num_rounds=2 if quick else 15)
        for shape in shapes
        for dtype in ("float32", "bfloat16")
    ]
