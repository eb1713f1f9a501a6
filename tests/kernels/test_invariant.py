"""mrl.kernels.invariant: a row's bits are its own, values are right, gradients are torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.kernels import invariant
from tests.kernels.threads import kernel_threads

SIZES = [(64, 128), (16, 8), (40, 7), (1, 5), (100, 33)]
"""(K, N): whole numbers of the kernels' lanes, and not."""


def rows_agree(op: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether every slice of rows gives what it gives among all of them."""
    whole = op(x)
    return all(
        torch.equal(op(x[start : start + count].clone()), whole[start : start + count])
        for count in (1, 2, 5, 16, 33)
        for start in range(0, len(x) - count, 7)
    )


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
def test_linear(num_inputs: int, num_outputs: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(70, num_inputs), torch.randn(num_outputs, num_inputs)
    assert rows_agree(lambda rows: invariant.linear(rows, weight), x)
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(invariant.linear(x, weight).double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [32, 40, 1])
def test_silu(width: int) -> None:
    x = torch.linspace(-120, 120, 70 * width).view(70, width)
    assert rows_agree(invariant.silu, x)
    torch.testing.assert_close(invariant.silu(x).double(), F.silu(x.double()), atol=1e-6, rtol=1e-6)


def test_torch_does_not_do_this() -> None:
    """What the kernels are for; where this fails, torch has changed and they may go."""
    torch.manual_seed(0)
    x, weight = torch.randn(70, 64), torch.randn(128, 64)
    assert not rows_agree(lambda rows: F.linear(rows, weight), x)


def attend(q: Tensor, k: Tensor, v: Tensor, first: list[int], count: list[int]) -> Tensor:
    start, seen = (torch.tensor(x, dtype=torch.int32) for x in (first, count))
    return invariant.attention(q, k, v, start, seen, scale=0.3)


@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (24, 40)])
def test_attention_of_one_query_is_that_of_all(size: int, value_size: int) -> None:
    torch.manual_seed(0)
    num = 67
    q, k, v = torch.randn(num, 4, size), torch.randn(num, 2, size), torch.randn(num, 2, value_size)
    whole = attend(q, k, v, [0] * num, list(range(1, num + 1)))
    batch = [x.double().transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(
        batch[0], batch[1], batch[2], is_causal=True, enable_gqa=True, scale=0.3
    )
    torch.testing.assert_close(whole.double(), exact[0].transpose(0, 1), atol=1e-6, rtol=1e-5)
    for t in range(num):
        assert torch.equal(attend(q[t : t + 1], k[: t + 1], v[: t + 1], [0], [t + 1])[0], whole[t])
    # The same sequence behind another one.
    behind = [torch.cat([torch.randn(9, *x.shape[1:]), x]) for x in (k, v)]
    assert torch.equal(attend(q, behind[0], behind[1], [9] * num, list(range(1, num + 1))), whole)


def test_threads_do_not_change_a_bit() -> None:
    torch.manual_seed(0)
    x, weight, q = torch.randn(300, 64), torch.randn(64, 64), torch.randn(300, 4, 16)
    ops = [
        lambda: invariant.linear(x, weight),
        lambda: invariant.silu(x.repeat(20, 1)),
        lambda: attend(q, q, q, [0] * 300, list(range(1, 301))),
    ]
    with kernel_threads(1):
        alone = [op() for op in ops]
    with kernel_threads(3):
        assert all(torch.equal(op(), first) for op, first in zip(ops, alone, strict=True))


def test_gradients_are_torchs() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7, 24, requires_grad=True)
    weight = torch.randn(9, 24, requires_grad=True)

    def gradients(linear: Callable[..., Tensor], silu: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(silu(linear(x, weight)).square().sum(), [x, weight])

    for ours, theirs in zip(
        gradients(invariant.linear, invariant.silu), gradients(F.linear, F.silu), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_bad_input_is_refused() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"linear: got x \[4, 8\] and weight \[3, 7\]"):
        invariant.linear(x, torch.randn(3, 7))
    with pytest.raises(ValueError, match=r"x: got torch.bfloat16 on cpu, expected torch.float32"):
        invariant.silu(x.bfloat16())
    heads = torch.randn(2, 4, 8)
    with pytest.raises(
        ValueError, match=r"query 1 sees 3 keys from 0 on, expected at least 1 of 2"
    ):
        attend(heads, heads, heads, [0, 0], [1, 3])
    with pytest.raises(ValueError, match=r"query 0 sees 0 keys"):
        attend(heads, heads, heads, [0, 0], [0, 1])
    with pytest.raises(ValueError, match=r"4 heads are not divisible by 3 groups"):
        attend(heads, torch.randn(2, 3, 8), torch.randn(2, 3, 8), [0, 0], [1, 1])
