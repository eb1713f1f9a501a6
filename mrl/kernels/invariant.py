"""Batch-invariant `linear`, `attention` and `silu`: a row's result does not depend on other rows.

The recipe key `rollout.true_on_policy` uses these ops: engine and trainer call the same functions,
the engine with one token at a time, the trainer with whole micro-batches. Forward values are computed
by csrc/invariant.h, in float32 on CPUs. Gradients are those of torch's own ops. They need not be
batch-invariant, because only the trainer computes gradients. docs/on_policy.md explains why torch's
forward is not sufficient.

Dimensions: K inputs, N outputs; M queries, h query heads, g heads of keys and values (a divisor of
h), d head size of queries and keys, e head size of values, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.kernels import backend


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x @ weight.T` in float32; the result [..., N] is differentiable.

    x: [..., K]. weight: [N, K]. Raises ValueError for a wrong dtype, device or shape.
    """
    _check(x=x, weight=weight)
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: got x {list(x.shape)} and weight {list(weight.shape)}")
    return _Linear.apply(x, weight)  # pyright: ignore[reportReturnType]


def silu(x: Tensor) -> Tensor:
    """Compute `x / (1 + exp(-x))` in float32, for `x` of any shape; the result is differentiable.

    Raises ValueError for a wrong dtype or device.
    """
    _check(x=x)
    return with_gradient_of(F.silu, _silu, x)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_key: Tensor,
    key_count: Tensor,
    scale: float,
) -> Tensor:
    """Compute `softmax(scale * q @ k.T) @ v`, float32 [M, h, e], without a gradient.

    `query` is [M, h, d], `key` [S, g, d], `value` [S, g, e]. Query m attends to exactly the keys
    first_key[m] to first_key[m] + key_count[m] - 1; both tensors are i32[M]. If a gradient is needed,
    use `with_gradient_of`.

    Raises ValueError for a query without keys, for keys out of range, and for a wrong dtype, device
    or shape.
    """
    _check(query=query, key=key, value=value)
    (num_queries, heads, key_size), (num_keys, groups, value_size) = query.shape, value.shape
    legend = (
        f"M = {num_queries} queries, S = {num_keys} keys, g = {groups} groups, h = {heads} heads"
    )
    float32, int32 = (torch.float32,), (torch.int32,)
    backend.check_tensor("key", key, (num_keys, groups, key_size), float32, query.device, legend)
    for name, bound in (("first_key", first_key), ("key_count", key_count)):
        backend.check_tensor(name, bound, (num_queries,), int32, query.device, legend)
    if not groups or heads % groups:
        raise ValueError(f"attention: {heads} heads are not divisible by {groups} groups")
    out = query.new_empty(num_queries, heads, value_size)
    backend.run(
        "invariant_attention",
        query.device,
        queries=query.detach().contiguous(),
        keys=key.detach().contiguous(),
        values=value.detach().contiguous(),
        first_key=first_key.contiguous(),
        key_count=key_count.contiguous(),
        num_queries=num_queries,
        num_keys=num_keys,
        num_heads=heads,
        num_groups=groups,
        key_size=key_size,
        value_size=value_size,
        scale=scale,
        out=out,
    )
    return out


def with_gradient_of(
    twin: Callable[..., Tensor], kernel: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """Return `kernel(*tensors)`; its gradient is the one that autograd computes for `twin(*tensors)`.

    `kernel` and `twin` must compute the same values up to rounding. The backward pass runs `twin`
    and differentiates it.
    """
    return _WithGradientOf.apply(twin, kernel, *tensors)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
        out = rows.new_empty(rows.shape[0], weight.shape[0])
        backend.run(
            "invariant_linear",
            rows.device,
            rows=rows,
            weights=weight.detach().contiguous(),
            num_rows=rows.shape[0],
            num_inputs=rows.shape[1],
            num_outputs=weight.shape[0],
            out=out,
        )
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grads[0].reshape(-1, weight.shape[0])
        grad_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
        return grad_x, grad_weight


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, twin: Any, kernel: Any, *tensors: Tensor) -> Tensor:
        ctx.twin = twin
        ctx.save_for_backward(*tensors)
        return kernel(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [
                t.detach().requires_grad_(want)
                for t, want in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            out = ctx.twin(*inputs)
        found = iter(torch.autograd.grad(out, [t for t in inputs if t.requires_grad], grads[0]))
        return None, None, *(next(found) if want else None for want in wanted)


def _silu(x: Tensor) -> Tensor:
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    backend.run("invariant_silu", x.device, x=x, count=x.numel(), out=out)
    return out


def _check(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ValueError(
                f"{name}: got {tensor.dtype} on {tensor.device}, expected torch.float32 on the CPU: "
                "only there the bits do not depend on the number of rows"
            )
