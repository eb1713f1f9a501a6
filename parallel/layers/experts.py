"""A rank's experts as grouped matrix products, with one kernel launch per projection instead of one
per expert.

`GroupedExperts` replaces Megatron's SequentialMLP in the layer spec. It is a subclass, and keeps
each expert's weights as separate parameters under SequentialMLP's names, so that checkpoints,
exports, digests and the optimizer see no difference.

`torch.nn.functional.grouped_mm` needs one operand [E, out, in]. If the parameters of the experts
lie at equal distances in one storage, that operand is a view and nothing is copied. `join_storages`
arranges this. Megatron's distributed optimizer, which moves all parameters into one buffer,
preserves the arrangement: it lays a rank's parameters out in reverse order, and `_Experts` lists
the last expert first. If the distances are not equal (a bucket of the buffer ends between two
experts, or a test assigns to `.data`), the operand is stacked in each pass. Each pass checks the
addresses, so the storages may be moved, emptied, refilled or reloaded at any time.

Dimensions: E local experts, m rows sorted by expert, H hidden size, F feed-forward size of this
rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from mrl.errors import InputError
from mrl.kernels import zero_empty_groups_

ALIGNMENT = 16
"""The stride of the rows in a grouped product must be a multiple of this many bytes
(`torch._meta_registrations._meta_grouped_mm_common`)."""


class _Experts(torch.nn.ModuleList):
    """A list of modules whose `parameters` and `state_dict` start with the last module.

    Iterating over the list starts with the first module.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        for number in reversed(range(len(modules))):
            self.add_module(str(number), modules[number])

    def __iter__(self) -> Any:
        return iter([self[number] for number in range(len(self))])


class GroupedExperts(SequentialMLP):
    """SwiGLU experts, or gpt-oss's clamped ones with biases, that are computed together.

    The constructor raises InputError if the configuration asks for experts of another kind.
    """

    add_update: Callable[[Tensor, Tensor, Tensor, list[Any]], Tensor] | None = None
    """A function that adds the updates of an adapter to a product
    (`parallel.lora.layers.add_expert_updates`); None if no adapter is attached."""

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        _check(config)
        super().__init__(num_local_experts, config, *args, **kwargs)
        self.local_experts = _Experts(list(self.local_experts))
        experts: list[Any] = list(self.local_experts)
        self._linears = ([e.linear_fc1 for e in experts], [e.linear_fc2 for e in experts])

    def join_storages(self) -> None:
        """Lay each projection's weights end to end in memory. Call this before anything else refers
        to the memory of the weights."""
        for linears in self._linears:
            join_parameters([linear.weight for linear in linears])

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Compute the experts for rows [m, H] with probs [m]. Return the outputs [m, H], and None
        in place of a bias.

        `tokens_per_expert` i64[E] is the number of rows of each expert.
        """
        rows, probs = permuted_local_hidden_states, permuted_probs
        ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        fc1, fc2 = self._linears
        hidden = self._product(rows, ends, fc1)
        if self.config.activation_func is quick_gelu:
            hidden = weighted_clamped_swiglu(
                self._with_bias(hidden, tokens_per_expert, fc1), probs, self.config
            )
            output = self._product(hidden, ends, fc2)
            return self._with_bias(output, tokens_per_expert, fc2, probs), None
        if self.config.bias_activation_fusion:  # Megatron's, which torch.compile fuses on GPUs
            in_fp8 = self.config.activation_func_fp8_input_store
            hidden = weighted_bias_swiglu_impl(hidden, None, probs.unsqueeze(-1), in_fp8)
        else:
            hidden = _WeightedSwiglu.apply(hidden, probs)
        return self._product(hidden, ends, fc2), None

    def _product(self, rows: Tensor, ends: Tensor, linears: list[Any]) -> Tensor:
        """Multiply rows [m, in] by one layer of each expert, and add the updates of an adapter, if
        one is attached. Return [m, out].

        `ends` i32[E] are the indices after each expert's last row.
        """
        for linear in linears:
            # Their forward does not run, but in these hooks Megatron's DDP waits for gathered weights.
            for hook in linear._forward_pre_hooks.values():
                hook(linear, ())
        product = grouped_linear(rows, ends, [linear.weight for linear in linears])
        return product if self.add_update is None else self.add_update(product, rows, ends, linears)

    def _with_bias(
        self, product: Tensor, num_rows: Tensor, linears: list[Any], probs: Tensor | None = None
    ) -> Tensor:
        """Add each expert's bias to its rows of `product` [m, out]. `num_rows` i64[E] is the number of
        rows of each expert.

        The bias of the second layer is multiplied by the row's prob, which `probs` [m] has. Ranks that
        split an expert sum their products later, so only the first of them adds that bias; all of them
        compute its gradient.
        """
        if linears[0].bias is None:
            return product
        biases = torch.stack([linear.bias for linear in linears])
        if biases.dtype.itemsize < 4:  # the gradients of many rows are added up
            biases = biases.float()
        counts = num_rows.to(product.device, non_blocking=True)
        bias = biases.repeat_interleave(counts, dim=0, output_size=len(product))
        if probs is None:
            return product + bias.to(product.dtype)
        if dist.get_rank(linears[0].tp_group) > 0:
            bias = bias - bias.detach()
        return product + (bias * probs.unsqueeze(-1)).to(product.dtype)


def _check(config: Any) -> None:
    """Raise InputError for experts that are neither SwiGLU without biases nor clamped SwiGLU as in
    gpt-oss, or that compute in fp8 or fp4."""
    plain = (
        ("activation_func", F.silu),
        ("add_bias_linear", False),
        ("activation_func_clamp_value", None),
        ("glu_linear_offset", 0.0),
    )
    for name, expected in (
        ("gated_linear_unit", True),
        *(() if getattr(config, "activation_func", F.silu) is quick_gelu else plain),
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
    """Lay parameters of the same shape end to end in memory."""
    joined = torch.stack([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, joined.unbind(0), strict=True):
        parameter.data = part


def grouped_linear(x: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply x [m, in], sorted by expert, by the weights [out, in] of E experts. Return [m, out].

    `ends` i32[E] are the indices after each expert's last row.
    """
    return _GroupedLinear.apply(x, ends, *weights)  # pyright: ignore


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Return the weights [out, in] of E experts as [E, out, in].

    The result is a view if the weights lie at equal distances in one storage, and otherwise a copy.
    """
    first = weights[0]
    addresses = [weight.data_ptr() for weight in weights]
    step = addresses[1] - addresses[0] if len(weights) > 1 else first.nbytes
    even = addresses == list(range(addresses[0], addresses[0] + step * len(weights), step or 1))
    one = first.untyped_storage().data_ptr() == weights[-1].untyped_storage().data_ptr()
    if even and one and step > 0 and step % first.element_size() == 0:
        size = (len(weights), *first.shape)
        return first.detach().as_strided(size, (step // first.element_size(), *first.stride()))
    return torch.stack([weight.detach() for weight in weights])


def grouped_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Multiply group by group: with `grouped_mm`, or with one product per group if the operands are
    not aligned. The result is contiguous.

    left [m, a] and right [E, a, b] give [m, b]; left [a, m] and right [m, b] give [E, a, b]. `ends`
    i32[E] has, for each group, the index in dimension m after its last row.

    `grouped_mm` accepts any distance between the experts of `right` in the first form. In the
    second form, which computes the gradient of the weights, it accepts any number of rows in a
    group (`prepare_grouped_gemm_data` in torch's aten/src/ATen/native/cuda/GroupMMCommon.cuh).
    """
    if _is_aligned(left) and _is_aligned(right):
        # Without the padding of its rows to 16 bytes, which is uninitialized: on CPUs with AMX, a
        # bf16 product of a view whose width is odd also reads the element beside it, and multiplies
        # it by 0, which gives NaN where that element is NaN (oneDNN of torch 2.13).
        return F.grouped_mm(left, right, offs=ends).contiguous()
    bounds = [0, *ends.tolist()]
    groups = list(itertools.pairwise(bounds))
    if right.dim() == 2:
        return torch.stack([left[:, a:b] @ right[a:b] for a, b in groups])
    return torch.cat([left[a:b] @ right[i] for i, (a, b) in enumerate(groups)])


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether one of the last two strides is 1 and the other a multiple of ALIGNMENT bytes,
    as `grouped_mm` requires.

    A matrix of a single column, as in an adapter of rank 1, is not aligned: both of its strides are
    1.
    """
    least, other = sorted(matrix.stride()[-2:])
    return least == 1 and other * matrix.element_size() % ALIGNMENT == 0


class _GroupedLinear(torch.autograd.Function):
    """Computes `grouped_linear`, with gradients for x [m, in] and the E weights [out, in]."""

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
        to_weights = grouped_product(grad.T, x, ends)
        # CUDA's product does not write the gradients of experts without rows.
        zero_empty_groups_(to_weights, ends)
        return to_x, None, *to_weights.unbind(0)


class _WeightedSwiglu(torch.autograd.Function):
    """Computes `silu(gate) * up * prob` [m, F]. For the backward pass it saves only its inputs:
    `hidden` [m, 2 F], which is gate and up side by side, and `probs` [m].

    As in Megatron's MLP, the activation is rounded to the dtype of the rows before it is weighted.
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


def weighted_clamped_swiglu(hidden: Tensor, probs: Tensor, config: Any) -> Tensor:
    """Compute gpt-oss's activation (`parallel.architectures.gpt_oss`) of `hidden` [m, 2 F], which is
    gate and up side by side, times `probs` [m]. Return [m, F].

    For the backward pass only the inputs are saved.
    """

    def activate(hidden: Tensor, probs: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        active = config.activation_func(gate) * (up + config.glu_linear_offset)
        return (active * probs.unsqueeze(-1)).to(hidden.dtype)

    return _Recomputed.apply(activate, hidden, probs)  # pyright: ignore


class _Recomputed(torch.autograd.Function):
    """Computes a function of tensors again in the backward pass, so that only its inputs are saved."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        return None, *torch.autograd.grad(output, inputs, grad)


def compute_one_by_one(chunk: torch.nn.Module) -> None:
    """Let Megatron's SequentialMLP compute the grouped experts of a chunk, so that results can be
    compared."""
    for module in chunk.modules():
        if isinstance(module, GroupedExperts):
            module.__class__ = SequentialMLP  # pyright: ignore[reportAttributeAccessIssue]


def join_storages(chunk: torch.nn.Module) -> None:
    """Call `GroupedExperts.join_storages` of every MoE layer of a chunk."""
    for module in chunk.modules():
        if isinstance(module, GroupedExperts):
            module.join_storages()
