"""Grouped experts beside Megatron's loop over experts: values, gradients, names; any storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from mrl.errors import InputError
from parallel import prepare
from parallel.layers import experts
from parallel.layers.experts import (
    GroupedExperts,
    _GroupedLinear,
    grouped_linear,
    grouped_product,
    stacked,
)
from parallel.model import unwrap
from tests.parallel.layouts import build, join_mesh
from tests.ranks import run_ranks

prepare()

SIZES = [5, 0, 7, 1]
HIDDEN, OUT = 8, 16


def loop(x: Tensor, weights: list[Tensor], sizes: list[int]) -> Tensor:
    parts = zip(x.split(sizes), weights, strict=True)
    return torch.cat([part @ weight.T for part, weight in parts])


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0, dtype=torch.int32)


def make_weights(dtype: torch.dtype, joined: bool, stride: int = 0) -> list[Tensor]:
    """One tensor each, or parts of one storage with `stride` elements of something else between."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(OUT, HIDDEN, generator=generator).to(dtype) for _ in SIZES]
    if joined:
        room = torch.zeros(len(SIZES), OUT * HIDDEN + stride, dtype=dtype)
        parts = [row[: OUT * HIDDEN].view(OUT, HIDDEN) for row in room]
        for part, weight in zip(parts, weights, strict=True):
            part.copy_(weight)
        weights = parts
    return [torch.nn.Parameter(weight) for weight in weights]


@pytest.mark.parametrize("sizes", [SIZES, [0, 0, 13, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_product_and_gradients(
    sizes: list[int], joined: bool, dtype: torch.dtype, limit: float
) -> None:
    x = torch.randn(sum(sizes), HIDDEN, dtype=dtype, requires_grad=True)
    weights = make_weights(dtype, joined)
    out = _GroupedLinear.apply(x, ends_of(sizes), *weights)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, [x, *weights], grad)
    theirs = torch.autograd.grad(loop(x, weights, sizes), [x, *weights], grad)
    assert torch.allclose(out, loop(x, weights, sizes), rtol=limit, atol=limit)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=limit, atol=limit)


def test_gradients_of_experts_without_rows_are_zero_whatever_the_product_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's product does not write them: here it is the CPU's, with NaN in their place."""
    x, weights = torch.randn(sum(SIZES), HIDDEN), make_weights(torch.bfloat16, joined=True)
    x = x.bfloat16().requires_grad_()
    products: list[Tensor] = []

    def leaves_out(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        found = grouped_product(left, right, ends)
        if right.dim() == 2:
            found[[n for n, size in enumerate(SIZES) if not size]] = torch.nan
            products.append(found.clone())
        return found

    monkeypatch.setattr(experts, "grouped_product", leaves_out)
    out = grouped_linear(x, ends_of(SIZES), weights)
    grads = torch.autograd.grad(out, weights, torch.randn_like(out))
    (product,) = products
    for grad, left, size in zip(grads, product, SIZES, strict=True):
        wanted = left if size else torch.zeros_like(left)
        assert torch.equal(grad.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("stride", [0, 24])
def test_weights_at_equal_distances_are_not_copied(stride: int) -> None:
    weights = make_weights(torch.float32, True, stride)
    whole = stacked(weights)
    assert whole.data_ptr() == weights[0].data_ptr()
    assert torch.equal(whole, torch.stack(weights))


def test_weights_anywhere_else_are_stacked() -> None:
    joined = make_weights(torch.float32, True)
    one = stacked(joined[:1])
    assert one.data_ptr() == joined[0].data_ptr()
    for weights in (
        make_weights(torch.float32, False),
        joined[::-1],
        [joined[0], joined[2], joined[3]],
        [joined[0], joined[0]],
        [joined[0], make_weights(torch.float32, False)[1]],
    ):
        assert torch.equal(stacked(weights), torch.stack(weights))


@pytest.mark.parametrize(("width", "rank"), [(HIDDEN, 3), (3, HIDDEN), (HIDDEN, 1), (1, HIDDEN)])
def test_widths_that_the_grouped_product_does_not_take(width: int, rank: int) -> None:
    """A [3, in] and B [out, 3] of an adapter of rank 3: rows of 12 bytes, where it wants multiples of
    16. Those of rank 1 are columns, both of whose strides are 1."""
    x = torch.randn(sum(SIZES), width, requires_grad=True)
    weights = [torch.randn(rank, width, requires_grad=True) for _ in SIZES]
    if rank == 3:
        grad, kept = torch.randn(sum(SIZES), rank), torch.stack(weights).detach()
        with pytest.raises(RuntimeError, match="16 bytes"):
            torch.nn.functional.grouped_mm(grad, kept, offs=ends_of(SIZES))
    out = grouped_linear(x, ends_of(SIZES), weights)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, [x, *weights], grad)
    theirs = torch.autograd.grad(loop(x, weights, SIZES), [x, *weights], grad)
    assert torch.allclose(out, loop(x, weights, SIZES), rtol=1e-6, atol=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rank", [3, 5])
def test_no_product_keeps_the_padding_of_its_rows(rank: int) -> None:
    """It is uninitialized memory, which oneDNN reads on CPUs with AMX: with NaN there, NaN came out of
    a bf16 product of an adapter of odd rank."""
    x = torch.randn(106, 16, dtype=torch.bfloat16, requires_grad=True)
    into = [torch.randn(rank, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    ends = torch.tensor([50, 106], dtype=torch.int32)
    low = grouped_linear(x, ends, into)
    assert low.stride() == (rank, 1)
    assert (low @ torch.randn(rank, 32, dtype=torch.bfloat16)).isfinite().all()
    back = [torch.randn(16, rank, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    (to_low,) = torch.autograd.grad(grouped_linear(low, ends, back).sum(), [low])
    assert to_low.stride() == (rank, 1)


def test_one_row_of_a_wider_matrix_has_gradients() -> None:
    """The grouped product pads the rows of its result."""
    x = torch.randn(4, 24, dtype=torch.bfloat16)[:1, :12]
    weights = [torch.randn(8, 12, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    out = grouped_linear(x, torch.tensor([0, 1], dtype=torch.int32), weights)
    empty, used = torch.autograd.grad(out, weights, torch.ones_like(out))
    assert torch.equal(empty, torch.zeros_like(empty))
    assert torch.equal(used, x.expand(8, 12))


def test_a_kernel_that_does_not_take_the_strides_is_not_asked() -> None:
    """The meta device checks what the kernels check."""
    for width, fits in ((16, True), (12, False)):
        left = torch.randn(13, width, device="meta", dtype=torch.bfloat16)
        right = torch.randn(4, 32, width, device="meta", dtype=torch.bfloat16).transpose(1, 2)
        ends = torch.zeros(4, dtype=torch.int32, device="meta")
        if fits:
            assert grouped_product(left, right, ends).shape == (13, 32)
        else:
            with pytest.raises(RuntimeError, match="16 bytes"):
                torch.nn.functional.grouped_mm(left, right, offs=ends)
            with pytest.raises(Exception, match="meta"):  # the loop reads the sizes
                grouped_product(left, right, ends)


def one_layer(model_path: Path, distributed: bool) -> dict[str, Any]:
    """The experts of one layer of a trained policy, grouped and one after the other."""
    policy = build(model_path, join_mesh(model_path, {}), distributed_optimizer=distributed)
    chunk = unwrap(policy.chunks[0])
    experts = next(m for m in chunk.modules() if isinstance(m, GroupedExperts))
    rows = torch.randn(sum(SIZES), 32, requires_grad=True)
    probs = torch.rand(sum(SIZES), requires_grad=True)
    inputs = [rows, probs, *experts.parameters()]
    found: dict[str, Any] = {"waited for": []}
    for number, expert in enumerate(experts.local_experts):
        # Where Megatron's DDP waits for weights that it gathers (overlap_param_gather).
        for linear in (expert.linear_fc1, expert.linear_fc2):
            linear.register_forward_pre_hook(lambda *_, n=number: found["waited for"].append(n))
    for name, kind in (
        ("grouped", GroupedExperts),
        ("fused", GroupedExperts),
        ("fp8", GroupedExperts),
        ("loop", SequentialMLP),
    ):
        # As on a GPU, not compiled here.
        experts.config.bias_activation_fusion = name in ("fused", "fp8")
        experts.config.activation_func_fp8_input_store = name == "fp8"
        found["waited for"].clear()
        out, _ = kind.forward(experts, rows, torch.tensor(SIZES), probs)
        found[f"{name} waited for"] = sorted(found["waited for"])
        found[name] = [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]
        found[f"{name} names"] = [key for key, _ in experts.named_parameters()]
    found["viewed"] = [
        stacked(weights).data_ptr() == weights[0].data_ptr()
        for weights in ([linear.weight for linear in linears] for linears in experts._linears)
    ]
    found["order"] = [expert is experts.local_experts[i] for i, expert in
                      enumerate(experts.local_experts)]  # fmt: skip
    return found


@pytest.mark.parametrize("distributed", [False, True])
def test_a_layer_computes_what_the_loop_computes_without_a_copy(
    distributed: bool, model_path: Path, tmp_path: Path
) -> None:
    (found,) = run_ranks(1, one_layer, model_path, distributed, folder=tmp_path)
    for name in ("grouped", "fused"):
        for ours, theirs in zip(found[name], found["loop"], strict=True):
            assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    # What the backward keeps in 8 bits changes gradients, and nothing else.
    assert torch.equal(found["fp8"][0], found["fused"][0])
    error = (found["fp8"][1] - found["fused"][1]).norm() / found["fused"][1].norm()
    assert 1e-3 < error < 0.1
    names = [f"local_experts.{i}.linear_fc{n}.weight" for i in range(4) for n in (1, 2)]
    assert sorted(found["grouped names"]) == names
    assert all(found["order"])
    assert found["grouped waited for"] == found["loop waited for"] == [0, 0, 1, 1, 2, 2, 3, 3]
    # With the distributed optimizer Megatron has moved the weights into one buffer.
    assert found["viewed"] == [True, True]


def test_other_experts_are_refused() -> None:
    from parallel.layers.experts import _check

    config = type("Config", (), {"gated_linear_unit": False})()
    with pytest.raises(InputError, match="got gated_linear_unit False, expected True"):
        _check(config)
