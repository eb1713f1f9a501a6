"""The order in which the kernels add, spelled out in torch: other orders are right but other bits.

Runs compare bit for bit only while this order stands, so a change of it must be a decision.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mrl.kernels import POLICY_STATS, seq_logratio
from tests.kernels.policy_cases import Case, Options, make_case, run_op

BLOCK, LANES = 1024, 32
LENGTHS = [1, 31, 32, 33, 500, 1024, 1025, 3000]


def fold(lanes: Tensor) -> Tensor:
    """The upper half onto the lower one, until one is left: f32[2^n] to f32[]."""
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def cpu_sum(values: Tensor) -> Tensor:
    """f64[] of f32[T]: in each block, token t to lane t % 32; what does not fill the lanes apart."""
    total = torch.zeros((), dtype=torch.float64)
    for block in values.split(BLOCK):
        whole = len(block) // LANES * LANES
        for part in (block[:whole], block[whole:]):
            padded = torch.zeros(-(-len(part) // LANES) * LANES)
            padded[: len(part)] = part
            lanes = torch.zeros(LANES)
            for row in padded.view(-1, LANES):
                lanes = lanes + row
            total = total + fold(lanes).double()
    return total


def cuda_sum(values: Tensor) -> Tensor:
    """f64[] of f32[T]: thread t % 256 of a block, then its warp as a butterfly, then warps in order."""
    total = torch.zeros((), dtype=torch.float64)
    for block in values.split(BLOCK):
        padded = torch.zeros(BLOCK)
        padded[: len(block)] = block
        threads = torch.zeros(256)
        for row in padded.view(4, 256):
            threads = threads + row
        warps = [fold(warp) for warp in threads.view(8, 32)]
        partial = warps[0]
        for warp in warps[1:]:
            partial = partial + warp
        total = total + partial.double()
    return total


def rough_case() -> Case:
    """Log-ratios of every size with all their digits: differences of near numbers have few, and add
    up exactly in any order."""
    case = make_case(LENGTHS, seed=11)
    rng = torch.Generator().manual_seed(0)
    sizes = torch.randint(-8, 1, case.logprobs.shape, generator=rng).float().exp2()
    logprobs = -torch.rand(case.logprobs.shape, generator=rng) * sizes
    return replace(case, logprobs=logprobs, old_logprobs=torch.zeros_like(logprobs))


def log_ratios(case: Case) -> list[Tensor]:
    gaps = torch.where(case.loss_mask, case.logprobs - case.old_logprobs, 0.0)
    return list(gaps.split(case.lengths))


def sums(case: Case) -> Tensor:
    given = (case.logprobs, case.old_logprobs, case.loss_mask, case.cu_seqlens)
    return seq_logratio(*given)[:, 0]


def test_cpu_order() -> None:
    case = rough_case()
    expected = torch.stack([cpu_sum(gaps) for gaps in log_ratios(case)])
    assert torch.equal(sums(case), expected)
    assert not torch.equal(sums(case), torch.stack([g.double().sum() for g in log_ratios(case)]))
    # The loss kernel adds the same numbers, negated, in the same order.
    for ratio in ("token", "sequence"):
        k1 = run_op(case, Options(ratio)).seq_stats[:, POLICY_STATS.index("k1_sum")]
        assert torch.equal(k1, -expected)


def test_cuda_order(emulated_cuda) -> None:
    case = rough_case()
    expected = torch.stack([cuda_sum(gaps) for gaps in log_ratios(case)])
    with emulated_cuda("forward"):
        assert torch.equal(sums(case), expected)
        k1 = run_op(case, Options("sequence")).seq_stats[:, POLICY_STATS.index("k1_sum")]
    assert torch.equal(k1, -expected)
