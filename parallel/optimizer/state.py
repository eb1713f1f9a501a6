"""The optimizer's state by parameter, whichever of Megatron's optimizers holds it.

Megatron keeps the state in three forms: for the parameter itself (FP32Optimizer), for an fp32 main
parameter (Float16OptimizerWithFloat16Params), or only for the range of a flattened shard that this
data-parallel rank owns (DistributedOptimizer). Torch's or TransformerEngine's Adam updates this
state. With `optimizer_cpu_offload` there are several Adams in a HybridDeviceOptimizer, which may
update separate fp32 copies. With Muon there is a Muon beside the Adam (`MuonAndAdam`).
This module presents all of these in one form: a range of the flattened parameter, and fp32 tensors
over this range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from parallel.optimizer import scaled_state
from parallel.optimizer.layer_wise import LayerWiseOptimizer
from parallel.optimizer.muon import Muon, MuonAndAdam

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = ("momentum_buffer",)
TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that count the steps in one tensor per parameter. The fused Adams of apex and
TransformerEngine count them in the parameter group."""


@dataclass(frozen=True)
class OptimizerShard:
    """This rank's part of one parameter's optimizer state. All tensors in it have the same number
    of elements, in any shape."""

    start: int
    """Index of the part's first element in the flattened shard of the parameter."""
    tensors: dict[str, Tensor]
    """`exp_avg` and `exp_avg_sq` of Adam or `momentum_buffer` of Muon, and `main` (the fp32 main
    parameter) unless the parameter itself is fp32."""
    sharded: bool
    """Whether the state is divided over data-parallel ranks, by ranges or by whole parameters;
    otherwise all data-parallel ranks have the same state."""
    write_back: Callable[[], None] | None = None
    """A function to call after the contents of `tensors` have changed. None if `tensors` are the
    state itself and there are no copies of it."""


def optimizer_shards(optimizer: Any) -> dict[int, OptimizerShard]:
    """Return this rank's part of each parameter's state, by `id(parameter)`. Moments are created as
    zeros if no step has created them yet."""
    shards = {}
    for part in parts_of(optimizer):
        sharded = isinstance(optimizer, LayerWiseOptimizer) or isinstance(
            part, DistributedOptimizer
        )
        stepped_by = _stepped_by(part.optimizer)
        for parameter, main, start in main_parameters(part):
            inner, adam = stepped_by[id(main)]
            if scaled_state.is_kept_by(adam):
                tensors, write_back = scaled_state.read(adam, inner)
            else:
                tensors, write_back = _state(adam, inner), None
                if parameter.dtype != torch.float32:
                    tensors["main"] = inner.detach()
                if inner is not main:
                    write_back = _refresh(main, inner, parameter.dtype == torch.float32)
            shards[id(parameter)] = OptimizerShard(start, tensors, sharded, write_back)
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.optimizer._sync_sub_optimizers_state_to_hdo()
    return shards


def write_back(shards: Mapping[int, OptimizerShard]) -> None:
    """Write the tensors of `shards` back to the optimizer, after their contents have changed."""
    for shard in shards.values():
        if shard.write_back is not None:
            shard.write_back()


def free_gradient_copies(optimizer: Any) -> None:
    """Free the fp32 copies of bf16 gradients that Megatron made for one step.

    There are copies for the whole model, or for the part that a HybridDeviceOptimizer updates on
    the device.
    """
    optimizer.zero_grad()
    for part in parts_of(optimizer):
        if isinstance(part.optimizer, HybridDeviceOptimizer) and part.optimizer.gpu_optimizer:
            part.optimizer.gpu_optimizer.zero_grad()


def get_step(optimizer: Any) -> int:
    """Return the number of Adam steps that this rank's parameters have taken; 0 before the first.

    Raises ValueError if the number is not the same for all parameters.
    """
    steps = {int(holder["step"]) for holder in _step_holders(optimizer) if "step" in holder}
    if len(steps) > 1:
        raise ValueError(f"parameters were stepped a different number of times: {sorted(steps)}")
    return steps.pop() if steps else 0


def steps_done(optimizer: Any, device: torch.device) -> int:
    """Return the largest result of `get_step` on any rank. A collective.

    Some pipeline stages may have no part of the adapter; their ranks count no steps.
    """
    step = torch.tensor(get_step(optimizer), device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(step, dist.ReduceOp.MAX)
    return int(step)


def set_step(optimizer: Any, step: int) -> None:
    """Set the number of Adam steps that were taken. Call `optimizer_shards` first, because it
    creates the counters."""
    for holder in _step_holders(optimizer):
        if torch.is_tensor(holder.get("step")):
            holder["step"].fill_(step)
        else:
            holder["step"] = step


def parts_of(optimizer: Any) -> Iterator[Any]:
    """Yield the parts of Megatron's optimizer that have parameters on this rank, such as one for dense
    parameters and one for experts."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield part


def _adams(optimizer: Any) -> list[Any]:
    if isinstance(optimizer, (HybridDeviceOptimizer, MuonAndAdam)):
        return list(optimizer.sub_optimizers)
    return [optimizer]


def _stepped_by(optimizer: Any) -> dict[int, tuple[Tensor, Any]]:
    """Return a dict with an entry for each tensor that Megatron gave to the optimizer. The key is the
    tensor's id. The value is a pair (tensor, Adam): the tensor that an Adam updates, and this Adam.

    A HybridDeviceOptimizer may let an Adam update a copy of the tensor that Megatron gave. All other
    optimizers update the given tensor itself.
    """
    outer = getattr(optimizer, "inner_param_to_orig_param", {})
    return {
        id(outer.get(inner, inner)): (inner, adam)
        for adam in _adams(optimizer)
        for group in adam.param_groups
        for inner in group["params"]
    }


def _state(adam: Any, inner: Tensor) -> dict[str, Tensor]:
    state = adam.state[inner]
    names = MOMENTUM if isinstance(adam, Muon) else MOMENTS
    for name in names:
        if name not in state:
            state[name] = torch.zeros_like(inner, dtype=torch.float32)
    if isinstance(adam, TORCH_ADAM) and "step" not in state:
        # Fused kernels read the step on their own device.
        on_device = any(group["fused"] for group in adam.param_groups)
        state["step"] = torch.zeros((), device=inner.device if on_device else "cpu")
    return {name: state[name] for name in names}


def _refresh(main: Tensor, inner: Tensor, is_weight: bool) -> Callable[[], None]:
    """Return a function that makes two copies of one main parameter equal after a load.

    `main` is the copy that Megatron holds, and `inner` the copy that an Adam updates. A load changes
    only one of them, and the returned function copies it to the other. If `is_weight`, `main` is the
    model's fp32 weight, which the load changes. Otherwise the load changes `inner`.
    """

    def copy() -> None:
        source, target = (main, inner) if is_weight else (inner, main)
        target.detach().copy_(source.detach())

    return copy


def _step_holders(optimizer: Any) -> Iterator[dict[str, Any]]:
    for part in parts_of(optimizer):
        for adam in _adams(part.optimizer):
            if isinstance(adam, TORCH_ADAM):
                yield from adam.state.values()
            elif not isinstance(adam, Muon):  # whose update does not depend on the number of steps
                yield from (group for group in adam.param_groups if group["params"])


def main_parameters(part: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (parameter, main parameter, start) for each parameter.

    The main parameter is the tensor that the optimizer updates: an fp32 copy of the parameter or
    the parameter itself, or only a range of one of these. `start` is the index, in the flattened
    parameter, of the main parameter's first element.
    """
    groups = part.optimizer.param_groups
    if isinstance(part, DistributedOptimizer):
        for parameter in part.model_param_gbuf_map:
            group, order = part.model_param_group_index_map[parameter]
            owned = part._get_model_param_range_map(parameter)["param"]
            yield parameter, groups[group]["params"][order], owned.start
        return
    of_main = {}
    if isinstance(part, Float16OptimizerWithFloat16Params):
        both = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
        for parameters, mains in both:
            of_main |= {id(m): p for p, m in zip(parameters, mains, strict=True)}
    for group in groups:
        for main in group["params"]:
            yield of_main.get(id(main), main), main, 0
