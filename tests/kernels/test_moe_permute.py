"""`moe_sort`, `moe_permute`, `moe_unpermute` and their oracle: places, values, gradients, bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.kernels import moe_ids, moe_permute, moe_sort, moe_unpermute, oracle
from mrl.kernels.moe_sort import ExpertOrder
from tests.kernels.threads import kernel_threads
from tests.release import release

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# One rounding of each result (half precision), or of each of up to 257 additions.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 5e-6, torch.float64: 2e-14}
RUNS = [None, "forward", "reverse", "shuffled"]
"""The CPU kernels, and the CUDA kernels in the emulator's orders of threads."""


def make_ids(n: int, num_experts: int, topk: int, seed: int = 0, absent: float = 0.0) -> Tensor:
    """i32[n, K] of different experts, in no order; a share of the choices is none (-1)."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.rand(n, num_experts, generator=rng).topk(topk).indices.int()
    return ids.masked_fill(torch.rand(n, topk, generator=rng) < absent, -1)


def sort(ids: Tensor, num_experts: int) -> ExpertOrder:
    return moe_sort(ids, num_experts, int((ids >= 0).sum()))


def weight_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def run_pair(ids: Tensor, num_experts: int, dtype: torch.dtype, size: int, seed: int = 0):
    """Values and gradients of both ops: copies, their gates, sums, and the gradients of the three."""
    rng = torch.Generator().manual_seed(seed)
    order = sort(ids, num_experts)
    m = len(order.tokens)
    random = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    exact = (random(len(ids), size).to(dtype), random(len(ids), num_experts), random(m, size))
    rows, table, results = exact[0], exact[1].to(weight_dtype(dtype)), exact[2].to(dtype)
    upstream = random(len(ids), size).to(dtype)

    def run(permute: Callable, unpermute: Callable, convert: Callable) -> list[Tensor]:
        leaves = [convert(x).requires_grad_() for x in (rows, table, results)]
        copied, gates = permute(leaves[0], leaves[1])
        summed = unpermute(leaves[2], None)
        weighted = unpermute(leaves[2], gates)
        plain = torch.autograd.grad(summed, leaves[2], convert(upstream), retain_graph=True)
        gated = torch.autograd.grad(weighted, leaves[1:], convert(upstream), retain_graph=True)
        back = torch.autograd.grad(copied, leaves[0], convert(results))
        return [x.detach() for x in (copied, gates, summed, weighted, *plain, *gated, *back)]

    kernel = run(
        lambda rows, table: moe_permute(rows, order, table),
        lambda rows, gates: moe_unpermute(rows, order, gates),
        lambda x: x.clone(),
    )
    expected = run(
        lambda rows, table: oracle.moe_permute(rows, ids, table),
        lambda rows, gates: oracle.moe_unpermute(rows, ids, gates),
        lambda x: x.double(),
    )
    return kernel, expected


def assert_pair(kernel: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for got, exact in zip(kernel, expected, strict=True):
        scale = 1 + float(exact.abs().max()) if exact.numel() else 1.0
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=TOLERANCE[got.dtype] * scale)
    assert [x.dtype for x in kernel] == [
        *(dtype, weight_dtype(dtype), dtype, dtype, dtype, weight_dtype(dtype), dtype, dtype)
    ]
    for copy in (0, 1, 4):  # of the copies, their gates and the plain gradient nothing is rounded
        assert torch.equal(kernel[copy].double(), expected[copy])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    n=st.integers(1, 70),
    num_experts=st.sampled_from([1, 2, 5, 8, 33]),
    topk=st.integers(1, 8),
    size=st.sampled_from([1, 3, 8, 40, 257]),
    absent=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=10, deadline=None)
def test_matches_the_oracle(dtype, n, num_experts, topk, size, absent, seed) -> None:
    ids = make_ids(n, num_experts, min(topk, num_experts), seed, absent)
    if not (ids >= 0).any():
        return
    assert_pair(*run_pair(ids, num_experts, dtype, size, seed), dtype)


@pytest.mark.parametrize(
    ("dtype", "size", "order"),
    [
        *((dtype, 40, "forward") for dtype in DTYPES),
        *(release(DTYPES[1], 7, order) for order in RUNS[1:3]),
        (DTYPES[1], 7, "shuffled"),
        (DTYPES[0], 40, "reverse"),
        release(DTYPES[0], 40, "shuffled"),
    ],
)
def test_cuda_kernels_match_the_oracle(emulated_cuda, dtype, size, order) -> None:
    ids = make_ids(70, 9, 5, absent=0.2)
    with emulated_cuda(order):
        kernel, expected = run_pair(ids, 9, dtype, size)
    assert_pair(kernel, expected, dtype)
    cpu, _ = run_pair(ids, 9, dtype, size)
    for i in (0, 1, 2, 4, 7):  # everything without products
        assert torch.equal(kernel[i], cpu[i])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("n", "num_experts", "topk", "absent"),
    [(1, 1, 1, 0.0), (64, 8, 2, 0.0), (65, 300, 8, 0.3), (200, 7, 7, 0.5), (0, 4, 2, 0.0)],
)
def test_sort_matches_the_oracle(emulated_cuda, run, n, num_experts, topk, absent) -> None:
    ids = make_ids(n, num_experts, topk, absent=absent)
    if run is None:
        got = sort(ids, num_experts)
    else:
        with emulated_cuda(run):
            got = sort(ids, num_experts)
    for mine, exact in zip(got, oracle.moe_sort(ids, num_experts), strict=True):
        assert torch.equal(mine.long(), exact)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("num_experts", [1, 31, 70])
def test_ids_of_a_map(emulated_cuda, run, num_experts) -> None:
    chosen = torch.rand(50, num_experts, generator=torch.Generator().manual_seed(1)) < 0.2
    width = int(chosen.sum(1).max())
    if run is None:
        ids = moe_ids(chosen, width)
    else:
        with emulated_cuda(run):
            ids = moe_ids(chosen, width)
    for row, mask in zip(ids.tolist(), chosen, strict=True):
        found = mask.nonzero().squeeze(1).tolist()
        assert row == found + [-1] * (width - len(found))


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_sums_are_embedding_bags_to_the_bit(dtype) -> None:
    """What mrl used before: every choice in its order, in fp32, rounded once."""
    ids = make_ids(300, 16, 6)
    order, rows = sort(ids, 16), torch.randn(300 * 6, 80).to(dtype)
    expected = F.embedding_bag(order.copies.long(), rows.float(), mode="sum").to(dtype)
    assert torch.equal(moe_unpermute(rows, order), expected)


def test_the_order_of_choices_is_the_order_of_the_sum() -> None:
    rows = torch.tensor([[1e8], [1.0], [-1e8]])  # of the experts 0, 1 and 2
    for ids, total in (([[0, 1, 2]], 0.0), ([[0, 2, 1]], 1.0)):
        order = sort(torch.tensor(ids, dtype=torch.int32), 3)
        assert moe_unpermute(rows, order).item() == total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_equal_over_runs_and_threads(dtype) -> None:
    ids = make_ids(4000, 64, 8)
    runs = []
    for threads in (1, 2, 2):
        with kernel_threads(threads):
            order = sort(ids, 64)
            rng = torch.Generator().manual_seed(0)
            rows = torch.randn(len(order.tokens), 64, generator=rng).to(dtype).requires_grad_()
            gates = torch.rand(len(rows), generator=rng).to(weight_dtype(dtype)).requires_grad_()
            out = moe_unpermute(rows, order, gates)
            copied, _ = moe_permute(out, order)
            grads = torch.autograd.grad(copied, (rows, gates), rows.detach())
            runs.append([*order, out.detach(), copied.detach(), *grads])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, runs[0], strict=True))


@pytest.mark.parametrize("order", RUNS[1:])
def test_a_token_alone_has_the_bits_that_it_has_among_others(emulated_cuda, order) -> None:
    ids = make_ids(9, 6, 4)
    whole = sort(ids, 6)
    rows = torch.randn(len(whole.tokens), 48).bfloat16()
    with emulated_cuda(order):
        summed = moe_unpermute(rows, whole)
        for token in range(9):
            alone = sort(ids[token : token + 1], 6)
            own = rows[whole.copies[token].sort().values.long()]
            assert torch.equal(moe_unpermute(own, alone)[0], summed[token])


@pytest.mark.parametrize("run", RUNS[:2])
@pytest.mark.parametrize(
    ("ids", "num_copies", "message"),
    [
        (
            [[0, 1], [2, 4]],
            None,
            r"got \[2, 4\] of token 1, expected different experts from 0 to 3",
        ),
        ([[0, -2], [2, 3]], None, r"got \[0, -2\] of token 0"),
        ([[0, 1], [2, 2]], None, r"got \[2, 2\] of token 1"),
        ([[0, 1], [2, -1]], None, r"ids: got 3 choices, expected 4"),
        ([[0, 1], [2, 3]], 3, r"ids: got 4 choices, expected 3"),
    ],
)
def test_bad_ids_are_named(emulated_cuda, run, ids, num_copies, message) -> None:
    ids = torch.tensor(ids, dtype=torch.int32)
    if run is None:
        with pytest.raises(ValueError, match=message):
            moe_sort(ids, 4, num_copies)
    else:
        with emulated_cuda(run), pytest.raises((RuntimeError, ValueError), match="ids"):
            moe_sort(ids, 4, num_copies)


@pytest.mark.parametrize("run", RUNS[:2])
def test_a_map_with_too_many_experts_is_refused(emulated_cuda, run) -> None:
    chosen = torch.ones(3, 4, dtype=torch.bool)
    if run is None:
        with pytest.raises(ValueError, match="chosen: got more than 2 experts of token 0"):
            moe_ids(chosen, 2)
    else:
        with emulated_cuda(run), pytest.raises((RuntimeError, ValueError), match="chosen"):
            moe_ids(chosen, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o, x: moe_ids(x, 2), r"chosen: got dtype torch.float32, expected torch.bool"),
        (lambda o, x: moe_ids(x[0].bool(), 2), r"chosen: got shape \[8\], expected \[n, E\]"),
        (lambda o, x: moe_ids(x.bool(), 0), r"width: got 0, expected at least 1"),
        (lambda o, x: moe_sort(x, 2), r"ids: got dtype torch.float32, expected torch.int32"),
        (lambda o, x: moe_sort(x[0].int(), 2), r"ids: got shape \[8\], expected \[n, K\]"),
        (lambda o, x: moe_sort(x.int(), 0), r"num_experts: got 0, expected at least 1"),
        (lambda o, x: moe_sort(x.int(), 2, 99), r"num_copies: got 99, expected 0 to 48"),
        (lambda o, x: moe_sort(x.int(), 2**30), r"ids: got 6 tokens x 1073741824 experts"),
        (lambda o, x: moe_permute(x.int(), o), r"rows: got dtype torch.int32, expected"),
        (lambda o, x: moe_permute(x[0], o), r"rows: got shape \[8\], expected \[n, H\]"),
        (lambda o, x: moe_permute(x[:3], o), r"copies: got shape \[6, 2\], expected \[3, 2\]"),
        (lambda o, x: moe_permute(x, o, x[:3]), r"table: got 3 tokens .*, expected 6"),
        (lambda o, x: moe_unpermute(x, o), r"tokens: got shape \[12\], expected \[6\]"),
        (
            lambda o, x: moe_unpermute(x.repeat(2, 1), o, x[0]),
            r"gates: got shape \[8\], expected \[12\]",
        ),
        (
            lambda o, x: moe_unpermute(x.repeat(2, 1), o, torch.ones(12, dtype=torch.float64)),
            r"gates: got dtype torch.float64, expected torch.float32",
        ),
    ],
)
def test_bad_arguments_are_named(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(sort(make_ids(6, 4, 2), 4), torch.zeros(6, 8))


def test_a_second_gradient_is_refused() -> None:
    order = sort(make_ids(6, 4, 2), 4)
    rows = torch.randn(12, 8, requires_grad=True)
    for op in (lambda x: moe_unpermute(x, order), lambda x: moe_permute(x[:6], order)[0]):
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(op(rows).sum(), rows, create_graph=True)


def test_opcheck() -> None:
    ops, ids = torch.ops.mrl, make_ids(6, 4, 2)
    order = sort(ids, 4)
    rows, table = torch.randn(6, 8, requires_grad=True), torch.rand(6, 4, requires_grad=True)
    copies, gates = torch.randn(12, 8, requires_grad=True), torch.rand(12, requires_grad=True)
    torch.library.opcheck(ops.moe_ids.default, (torch.ones(3, 4).bool(), 4))
    torch.library.opcheck(ops.moe_sort.default, (ids, 4, 12))
    torch.library.opcheck(ops.moe_permute.default, (rows, table, *order[:3]))
    for weights in (None, gates):
        arguments = (copies, weights, order.tokens, order.copies)
        torch.library.opcheck(ops.moe_unpermute.default, arguments)
