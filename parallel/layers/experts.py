"""A rank's experts are grouped matrix products: one launch a projection, not one an expert.

Takes the place of Megatron's SequentialMLP in the layer spec, is a subclass of it, and keeps each
expert's weights as parameters of their own under SequentialMLP's names: checkpoints, exports, digests
and the optimizer see no difference.

`torch.nn.functional.grouped_mm` wants one operand [E, out, in]. Where the parameters of the experts lie
at equal distances in one storage, that operand is a view and nothing is copied. `join_storages` sets
that up; Megatron's distributed optimizer, which moves all parameters into one buffer, keeps it up,
because it lays a rank's parameters out in the reverse of their order, and `_Experts` names the last
expert first. Anywhere else (a bucket of the buffer ends between two experts, a test assigns to `.data`)
the operand is stacked for each pass. Which of the two it is, is decided at each pass by the addresses,
so moving, emptying, refilling or reloading the storages needs no care.

E local experts, m rows sorted by expert, H hidden, F feed-forward size of this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from mrl.errors import InputError
from mrl.kernels import zero_empty_groups_

ALIGNMENT = 16
"""Bytes: the grouped product takes rows whose stride is a multiple of it
(`torch._meta_registrations._meta_grouped_mm_common`)."""


class _Experts(torch.nn.ModuleList):
    """Modules that `parameters` and `state_dict` list from last to first; iteration does not."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        for number in reversed(range(len(modules))):
            self.add_module(str(number), modules[number])

    def __iter__(self) -> Any:
        return iter([self[number] for number in range(len(self))])


class GroupedExperts(SequentialMLP):
    """These SwiGLU experts without biases are computed together.

    Raises InputError where the configuration asks for other experts.
    """

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        _check(config)
        super().__init__(num_local_experts, config, *args, **kwargs)
        self.local_experts = _Experts(list(self.local_experts))
        experts: list[Any] = list(self.local_experts)
        self._linears = ([e.linear_fc1 for e in experts], [e.linear_fc2 for e in experts])

    def join_storages(self) -> None:
        """Lay each projection's weights end to end. Call it before anything keeps their data."""
        for linears in self._linears:
            join_parameters([linear.weight for linear in linears])

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """[m, H], i64[E] how many rows each expert has, [m] -> ([m, H], None)."""
        rows, probs = permuted_local_hidden_states, permuted_probs
        ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        fc1, fc2 = self._linears
        hidden = self._product(rows, ends, fc1)
        if self.config.bias_activation_fusion:  # Megatron's, which torch.compile fuses on GPUs
            in_fp8 = self.config.activation_func_fp8_input_store
            hidden = weighted_bias_swiglu_impl(hidden, None, probs.unsqueeze(-1), in_fp8)
        else:
            hidden = _WeightedSwiglu.apply(hidden, probs)
        return self._product(hidden, ends, fc2), None

    def _product(self, rows: Tensor, ends: Tensor, linears: list[Any]) -> Tensor:
        """[m, in], i64[E], one linear layer of each expert -> [m, out]."""
        for linear in linears:
            # Their own forward does not run, but Megatron's DDP waits for gathered weights in a hook.
            for hook in linear._forward_pre_hooks.values():
                hook(linear, ())
        return grouped_linear(rows, ends, [linear.weight for linear in linears])


def _check(config: Any) -> None:
    """Raise InputError for experts that are not SwiGLU without biases in plain precision."""
    for name, expected in (
        ("gated_linear_unit", True),
        ("activation_func", F.silu),
        ("add_bias_linear", False),
        ("activation_func_clamp_value", None),
        ("glu_linear_offset", 0.0),
        ("moe_apply_probs_on_input", False),
        ("moe_latent_size", None),
        ("fp8", None),
        ("fp4", None),
    ):
        if (value := getattr(config, name, expected)) != expected:
            raise InputError(
                f"grouped experts: got {name} {value}, expected {expected}; use "
                "model.transformer_impl: transformer_engine for it"
            )


def join_parameters(parameters: Sequence[Any]) -> None:
    """Lay parameters of one shape end to end."""
    joined = torch.stack([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, joined.unbind(0), strict=True):
        parameter.data = part


def grouped_linear(x: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply x [m, in], sorted by expert, with the weights [out, in] of E experts -> [m, out]. `ends`
    i32[E]: where the rows of each expert end."""
    return _GroupedLinear.apply(x, ends, *weights)  # pyright: ignore


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """[out, in] of E experts -> [E, out, in]: a view where they lie at equal distances, else a copy."""
    first = weights[0]
    with torch._C.DisableTorchFunction():
        addresses = [weight.data_ptr() for weight in weights]
        step = addresses[1] - addresses[0] if len(weights) > 1 else first.nbytes
        even = addresses == list(range(addresses[0], addresses[0] + step * len(weights), step or 1))
        one = first.untyped_storage().data_ptr() == weights[-1].untyped_storage().data_ptr()
        if even and one and step > 0 and step % first.element_size() == 0:
            size = (len(weights), *first.shape)
            return first.detach().as_strided(size, (step // first.element_size(), *first.stride()))
        return torch.stack([weight.detach() for weight in weights])


def grouped_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm`, or one product a group where it does not take the operands.

    left [m, a], right [E, a, b] -> [m, b]; left [a, m], right [m, b] -> [E, a, b]. ends i32[E].

    The experts of `right` may lie at any distance, and with rows of `left` and `right` that are not
    split (a transposed left operand, as in the gradient) a group may have any number of rows
    (`prepare_grouped_gemm_data` in torch's aten/src/ATen/native/cuda/GroupMMCommon.cuh).
    """
    if _is_aligned(left) and _is_aligned(right):
        return F.grouped_mm(left, right, offs=ends)
    bounds = [0, *ends.tolist()]
    groups = list(itertools.pairwise(bounds))
    if right.dim() == 2:
        return torch.stack([left[:, a:b] @ right[a:b] for a, b in groups])
    return torch.cat([left[a:b] @ right[i] for i, (a, b) in enumerate(groups)])


def _is_aligned(matrix: Tensor) -> bool:
    """Whether one of the last two strides is 1 and the other a multiple of ALIGNMENT bytes. A column,
    as in an adapter of rank 1, has the stride 1 twice."""
    least, other = sorted(matrix.stride()[-2:])
    return least == 1 and other * matrix.element_size() % ALIGNMENT == 0


class _GroupedLinear(torch.autograd.Function):
    """x [m, in], ends i32[E], E weights [out, in] -> [m, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, ends, *weights)
        if not len(x):
            return x.new_zeros(0, weights[0].shape[0])
        return grouped_product(x, stacked(weights).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, ends, *weights = ctx.saved_tensors
        if not len(x):
            return torch.zeros_like(x), None, *(torch.zeros_like(w) for w in weights)
        grad = grad.contiguous()
        to_x = grouped_product(grad, stacked(weights), ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return to_x, None, *(None for _ in weights)
        # The product pads its rows to 16 bytes, so it is not contiguous for every width.
        to_weights = grouped_product(grad.T, x, ends).contiguous()
        # CUDA's product does not write the gradients of experts without rows.
        zero_empty_groups_(to_weights, ends)
        return to_x, None, *to_weights.unbind(0)


class _WeightedSwiglu(torch.autograd.Function):
    """[gate; up] [m, 2 F], probs [m] -> silu(gate) up prob [m, F], keeping only its inputs.

    Rounds where Megatron's MLP does: the activation to the dtype of the rows before it is weighted.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, probs: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, probs)
        gate, up = hidden.chunk(2, dim=-1)
        return (F.silu(gate).mul_(up) * probs.unsqueeze(-1)).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        hidden, probs = ctx.saved_tensors
        gate, up = hidden.chunk(2, dim=-1)
        active = F.silu(gate)
        to_probs = (grad * (active * up)).sum(-1, dtype=probs.dtype)
        to_product = (grad * probs.unsqueeze(-1)).to(hidden.dtype)
        to_hidden = torch.empty_like(hidden)
        to_gate, to_up = to_hidden.chunk(2, dim=-1)
        torch.mul(to_product, active, out=to_up)
        to_gate.copy_(torch.ops.aten.silu_backward(to_product * up, gate))
        return to_hidden, to_probs


def compute_one_by_one(chunk: torch.nn.Module) -> None:
    """Let Megatron's SequentialMLP compute what the grouped experts of a chunk hold: to compare."""
    for module in chunk.modules():
        if isinstance(module, GroupedExperts):
            module.__class__ = SequentialMLP  # pyright: ignore[reportAttributeAccessIssue]


def join_storages(chunk: torch.nn.Module) -> None:
    """Call `GroupedExperts.join_storages` of every MoE layer of a chunk."""
    for module in chunk.modules():
        if isinstance(module, GroupedExperts):
            module.join_storages()
