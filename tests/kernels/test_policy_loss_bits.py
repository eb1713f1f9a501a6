"""What must not change a bit of `mrl::policy_loss`: threads, packing, splits, masked garbage, AVX."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mrl.kernels import POLICY_STATS, policy_loss, seq_logratio
from tests.kernels.policy_cases import (
    FEW_OPTIONS,
    WEIGHTS,
    Options,
    make_case,
    run_op,
    select,
    with_garbage,
)
from tests.kernels.threads import kernel_threads

LENGTHS = [(i * 577) % 3000 for i in range(40)]
EVERY_SUM = Options("sequence", FEW_OPTIONS[4].clip, FEW_OPTIONS[4].importance, FEW_OPTIONS[4].kl)


def assert_same_bits(first, second) -> None:
    for name in ("loss", "grad", "stats", "seq_stats"):
        a, b = getattr(first, name), getattr(second, name)
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("o", FEW_OPTIONS, ids=str)
def test_threads_change_no_bit(o) -> None:
    case = make_case(LENGTHS, seed=5)
    with kernel_threads(1):
        one = run_op(case, o)
    with kernel_threads(2):
        assert_same_bits(run_op(case, o), one)


@pytest.mark.parametrize("o", FEW_OPTIONS, ids=str)
@pytest.mark.parametrize("token_advantages", [False, True])
def test_packing_order_changes_no_bit(o, token_advantages) -> None:
    case = make_case(LENGTHS, seed=5, token_advantages=token_advantages)
    whole = run_op(case, o)
    for seed in range(3):
        order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(seed)).tolist()
        mixed = run_op(select(case, order), o)
        assert torch.equal(mixed.loss, whole.loss)
        assert torch.equal(mixed.stats, whole.stats)
        assert torch.equal(mixed.seq_stats, whole.seq_stats[order])
        parts = whole.grad.split(LENGTHS)
        assert torch.equal(mixed.grad, torch.cat([parts[i] for i in order]))


@pytest.mark.parametrize("o", FEW_OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [[40], [1] * 40, [3, 1, 36], [20, 20]])
def test_micro_batches_change_no_bit(o, sizes) -> None:
    case = make_case(LENGTHS, seed=5)
    whole = run_op(case, o)
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    parts = [run_op(select(case, list(range(start, end))), o) for start, end in pairwise(ends)]
    assert torch.equal(torch.cat([part.grad for part in parts]), whole.grad)
    assert torch.equal(torch.cat([part.seq_stats for part in parts]), whole.seq_stats)
    total = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(total, whole.loss, rtol=1e-13, atol=1e-13)


def test_alone_or_among_64_a_sequence_has_the_same_bits() -> None:
    case = make_case([700 + 3 * i for i in range(64)], seed=8)
    whole = run_op(case, EVERY_SUM)
    starts = case.cu_seqlens.tolist()
    for i in (0, 31, 63):
        alone = run_op(select(case, [i]), EVERY_SUM)
        assert torch.equal(alone.grad, whole.grad[starts[i] : starts[i + 1]])
        assert torch.equal(alone.seq_stats[0], whole.seq_stats[i])


@pytest.mark.parametrize("o", FEW_OPTIONS, ids=str)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_masked_tokens_change_no_bit(o, garbage) -> None:
    case = make_case([0, 1, 40, 1500, 7], seed=3)
    clean = run_op(case, o)
    assert_same_bits(run_op(with_garbage(case, garbage), o), clean)
    assert bool((clean.grad[~case.loss_mask] == 0).all())
    assert o.importance in WEIGHTS[3:] or bool((clean.grad[case.loss_mask] != 0).any())


def test_the_sum_over_sequences_keeps_what_cancels() -> None:
    """1e8 and -1e8 cancel in any order, and what is left is what is small, to its last digits."""
    case = make_case([4] * 200, seed=1, keep=1.0)
    weights = torch.randn(200, generator=torch.Generator().manual_seed(0))
    weights[::2] *= 1e8
    weights[1::2] = -weights[::2]
    weights[-1] = 1e-3
    case = replace(case, seq_weight=weights, advantages=torch.ones(200))
    case = replace(case, logprobs=case.old_logprobs)  # every objective is exactly its weight
    expected = -weights.double().sum()
    for order in (list(range(200)), list(range(199, -1, -1))):
        loss = run_op(select(case, order), Options()).loss / 4
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("o", FEW_OPTIONS, ids=str)
def test_parts_of_sequences_on_two_ranks_add_up(o) -> None:
    """Context parallelism: each rank has half of every sequence and the sums over both."""
    case = make_case([40, 1040, 6], seed=6)
    whole = run_op(case, o)
    bounds = case.cu_seqlens.tolist()
    halves = []
    for side in (0, 1):
        tokens, lengths = [], []
        for start, end in pairwise(bounds):
            middle = (start + end) // 2
            tokens += list(range(start, middle) if side == 0 else range(middle, end))
            lengths.append(middle - start if side == 0 else end - middle)
        keep = torch.tensor(tokens)
        names = ("logprobs", "old_logprobs", "loss_mask", "rollout_logprobs", "ref_logprobs")
        taken = {name: getattr(case, name)[keep] for name in names}
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        halves.append((keep, replace(case, **taken, cu_seqlens=cu_seqlens)))

    def sums(a: str, b: str) -> torch.Tensor:
        return sum(
            seq_logratio(getattr(h, a), getattr(h, b), h.loss_mask, h.cu_seqlens) for _, h in halves
        )

    shared = {}
    if o.ratio == "sequence":
        shared["seq_logratio"] = sums("logprobs", "old_logprobs")
    if o.importance and o.importance.level == "sequence":
        shared["seq_importance"] = sums("old_logprobs", "rollout_logprobs")
    grad = torch.zeros_like(whole.grad)
    loss, stats = torch.zeros((), dtype=torch.float64), torch.zeros_like(whole.stats)
    for keep, half in halves:
        leaf = half.logprobs.clone().requires_grad_()
        result = policy_loss(**half.arguments(o) | {"logprobs": leaf} | shared)
        grad[keep] = torch.autograd.grad(result.loss, leaf)[0]
        loss = loss + result.loss.detach()
        stats = stats + result.stats
    torch.testing.assert_close(grad, whole.grad, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(loss, whole.loss, rtol=1e-6, atol=1e-9)
    summed = [i for i, name in enumerate(POLICY_STATS) if not name.endswith("_max")]
    torch.testing.assert_close(stats[summed], whole.stats[summed], rtol=1e-6, atol=1e-9)


TARGETS = ("narrow", "medium", "wide")
AVX_CODE = """
import os, sys, torch
from tests.kernels.policy_cases import FEW_OPTIONS, make_case, run_op
folder, *targets = sys.argv[1:]
for target in targets:
    if os.fork():
        os.wait()
        continue
    os.environ["MRL_CPU_TARGET"] = target  # read at the first call of an op
    try:
        case = make_case([0, 1, 40, 1500, 7, 2100], seed=3)
        results = [run_op(case, o) for o in FEW_OPTIONS]
        torch.save([[r.loss, r.grad, r.stats, r.seq_stats] for r in results], f"{folder}/{target}.pt")
    except Exception as error:
        print(target, type(error).__name__, error, file=sys.stderr, flush=True)
    os._exit(0)
"""


def test_instruction_sets_agree(tmp_path) -> None:
    """AVX2 and AVX-512 add in the same order and fuse the same products; SSE cannot fuse. An unknown
    instruction set is an error and no crash."""
    done = subprocess.run(
        [sys.executable, "-c", AVX_CODE, str(tmp_path), *TARGETS, "bogus"],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "bogus ValueError MRL_CPU_TARGET: got 'bogus'" in done.stderr
    results = {}
    for target in TARGETS:
        path = tmp_path / f"{target}.pt"
        if not path.exists():
            assert target != "narrow", done.stderr
            assert f"{target} ValueError MRL_CPU_TARGET: got" in done.stderr
            continue
        results[target] = torch.load(path, weights_only=True)
    narrow = results.pop("narrow")
    first = next(iter(results.values()), narrow)
    for target, found in results.items():
        for ours, theirs, plain in zip(found, first, narrow, strict=True):
            for a, b, c in zip(ours, theirs, plain, strict=True):
                assert torch.equal(a, b), target
                torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-7)
