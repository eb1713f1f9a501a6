"""Fused kernels against eager PyTorch on this CPU: `python benchmarks/bench_kernels.py`.

Forward and backward, one thread, interleaved medians: each round times both, so that a slow moment
of the machine hits both. A case passes when the fused loss and gradient agree with the fp64 oracle
to 1e-5. Writes benchmarks/results/kernels_cpu.json; figures are ratios taken in one run.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import mrl
from mrl.kernels import oracle, policy_loss

RESULT = Path(__file__).parent / "results" / "kernels_cpu.json"
SHAPES = [(8, 256), (32, 1024), (256, 2048)]  # sequences, tokens each
VARIANTS = {
    "grpo": {"ratio": "token", "clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
}
TOLERANCE = 1e-5
NUM_ROUNDS = 25


class Batch(NamedTuple):
    """Arguments of `policy_loss`, in its order."""

    logprobs: Tensor
    old_logprobs: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    advantages: Tensor
    seq_weight: Tensor


def make_batch(num_sequences: int, length: int, variant: str) -> Batch:
    """Equal lengths (the best case of eager, which needs no padding), a quarter of it prompt."""
    rng = torch.Generator().manual_seed(0)
    shape = (num_sequences, length)
    # Per-sequence mean log-ratios about as wide as the clip range.
    spread = 0.2 if variant == "grpo" else 3e-4 * length**0.5
    old = -torch.rand(shape, generator=rng)
    logprobs = old + spread * torch.randn(shape, generator=rng)
    mask = (torch.arange(length) >= length // 4).expand(shape)
    per_sequence = mask[0].sum() if variant == "grpo" else 1
    weights = torch.full((num_sequences,), 1.0 / (num_sequences * int(per_sequence)))
    return Batch(
        logprobs.flatten(),
        old.flatten(),
        mask.flatten().contiguous(),
        torch.arange(0, num_sequences * length + 1, length, dtype=torch.int32),
        torch.randn(num_sequences, generator=rng),
        weights,
    )


def fused(leaf: Tensor, batch: Batch, settings: dict) -> Tensor:
    return policy_loss(leaf, *batch[1:], **settings).loss


def eager(leaf: Tensor, batch: Batch, settings: dict) -> Tensor:
    """The usual [B, T] code, with the statistics that the fused op returns."""
    shape = (batch.advantages.numel(), -1)
    mask = batch.loss_mask.view(shape)
    logratio = (leaf - batch.old_logprobs).view(shape).masked_fill(~mask, 0.0)
    advantages, weights = batch.advantages[:, None], batch.seq_weight[:, None]
    if settings["ratio"] == "sequence":
        ratio = (logratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).exp()
        mask = torch.ones_like(ratio, dtype=torch.bool)
    else:
        ratio = logratio.exp()
    free = ratio * advantages
    bounded = ratio.clamp(1 - settings["clip_low"], 1 + settings["clip_high"]) * advantages
    objective = torch.minimum(free, bounded).masked_fill(~mask, 0.0)
    with torch.no_grad():
        seen = ratio.masked_fill(~mask, 0.0)
        _ = seen.sum(), mask.sum(), seen.max(), ((bounded < free) & mask).sum()
    return -(weights * objective).sum()


def run_once(function: Callable, batch: Batch, settings: dict) -> tuple[Tensor, Tensor, float]:
    """Loss, gradient and seconds of one forward and backward."""
    leaf = batch.logprobs.clone().requires_grad_()
    start = time.perf_counter()
    loss = function(leaf, batch, settings)
    loss.backward()
    elapsed = time.perf_counter() - start
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, elapsed


def agrees(batch: Batch, settings: dict) -> bool:
    """Whether loss and gradient are within TOLERANCE of the oracle, relative to the largest."""
    loss, grad, _ = run_once(fused, batch, settings)
    leaf = batch.logprobs.double().requires_grad_()
    expected = oracle.policy_loss(leaf, *batch[1:], **settings).loss
    expected.backward()
    assert leaf.grad is not None
    loss_error = float((loss - expected.detach()).abs() / expected.detach().abs())
    # A ratio within fp32 of a clip bound may land on its other side: a jump, not an error.
    off = (grad - leaf.grad).abs() > TOLERANCE * leaf.grad.abs().max()
    gap = (batch.logprobs.double() - batch.old_logprobs.double()).exp()
    bounds = (1 - settings["clip_low"], 1 + settings["clip_high"])
    at_bound = torch.stack([(gap - bound).abs() < 1e-6 for bound in bounds]).any(0)
    if settings["ratio"] == "token":
        off &= ~at_bound
    return loss_error < TOLERANCE and not bool(off.any())


def measure(variant: str, shape: tuple[int, int]) -> tuple[dict, bool]:
    """One row of the result, and whether the fused op agrees with the oracle."""
    settings = VARIANTS[variant]
    batch = make_batch(*shape, variant)
    passed = agrees(batch, settings)
    seconds: dict[Callable, list[float]] = {fused: [], eager: []}
    for round_ in range(-3, NUM_ROUNDS):  # the first three warm up
        for function, taken in seconds.items():
            elapsed = run_once(function, batch, settings)[2]
            if round_ >= 0:
                taken.append(elapsed)
    medians = {function: statistics.median(taken) for function, taken in seconds.items()}
    row = {
        "kernel": "policy_loss",
        "variant": variant,
        "shape": list(shape),
        "dtype": "float32",
        "threads": 1,
        "vs_eager": round(medians[eager] / medians[fused], 2),
    }
    verdict = "ok" if passed else "DISAGREES with the oracle"
    print(
        f"policy_loss {variant} {shape[0]}x{shape[1]}: fused {medians[fused] * 1e3:.3f} ms, "
        f"eager / fused {row['vs_eager']:.2f}, {verdict}"
    )
    return row, passed


def main() -> int:
    torch.set_num_threads(1)
    rows, passes = [], []
    for variant in VARIANTS:
        for shape in SHAPES:
            row, passed = measure(variant, shape)
            rows.append(row)
            passes.append(passed)
    report = {
        "versions": {
            "mrl": mrl.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}",
        "measured": f"forward and backward, medians of {NUM_ROUNDS} interleaved rounds",
        "results": rows,
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{sum(passes)} passed, {len(passes) - sum(passes)} failed")
    return 0 if all(passes) else 1


if __name__ == "__main__":
    sys.exit(main())
