"""Adam's state by parameter, whichever of Megatron's optimizers holds it.

Megatron keeps the state in three shapes: beside the parameter itself (FP32Optimizer), beside an fp32
main parameter (Float16OptimizerWithFloat16Params), or only for a range of the flattened shard that
this data-parallel rank owns (DistributedOptimizer). What steps a range is torch's Adam, or that of
TransformerEngine, or with `optimizer_cpu_offload` one of the several inside a HybridDeviceOptimizer,
which step fp32 copies of their own. Here they are one: a range, and fp32 tensors over it.
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

from parallel import scaled_state

MOMENTS = ("exp_avg", "exp_avg_sq")
TORCH_ADAM = (torch.optim.Adam, torch.optim.AdamW)
"""They count the steps in a tensor for every parameter; the fused ones of apex and TransformerEngine
in the parameter group."""


@dataclass(frozen=True)
class OptimizerShard:
    """The state of one parameter that this rank holds; tensors of one size, in any shape."""

    start: int
    """Number of the first element in the flattened shard of the parameter."""
    tensors: dict[str, Tensor]
    """`exp_avg`, `exp_avg_sq`, and `main` (fp32) where it is not the parameter itself."""
    sharded: bool
    """Shared out over data-parallel ranks, and not the same on each of them."""
    write_back: Callable[[], None] | None = None
    """Must be called once `tensors` have other contents, where they are not the state itself or the
    state has copies."""


def optimizer_shards(optimizer: Any) -> dict[int, OptimizerShard]:
    """`id(parameter)` -> its state. Moments that the first step has not made yet become zeros."""
    shards = {}
    for part in _parts(optimizer):
        sharded = isinstance(part, DistributedOptimizer)
        stepped_by = _stepped_by(part.optimizer)
        for parameter, main, start in _main_parameters(part):
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
    """After the contents of the tensors of `optimizer_shards` were replaced."""
    for shard in shards.values():
        if shard.write_back is not None:
            shard.write_back()


def free_gradient_copies(optimizer: Any) -> None:
    """Let go of what Megatron made of the gradients for one step: fp32 copies of bf16 gradients, of the
    whole model or of the part of it that a HybridDeviceOptimizer steps on the device."""
    optimizer.zero_grad()
    for part in _parts(optimizer):
        if isinstance(part.optimizer, HybridDeviceOptimizer) and part.optimizer.gpu_optimizer:
            part.optimizer.gpu_optimizer.zero_grad()


def get_step(optimizer: Any) -> int:
    """Adam steps done: one number, as every parameter takes part in every step."""
    steps = {int(holder["step"]) for holder in _step_holders(optimizer) if "step" in holder}
    if len(steps) > 1:
        raise ValueError(f"parameters were stepped a different number of times: {sorted(steps)}")
    return steps.pop() if steps else 0


def steps_done(optimizer: Any, device: torch.device) -> int:
    """Adam steps done by the ranks that train something: a pipeline stage without a matrix of the
    adapter counts none. A collective."""
    step = torch.tensor(get_step(optimizer), device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(step, dist.ReduceOp.MAX)
    return int(step)


def set_step(optimizer: Any, step: int) -> None:
    """After `optimizer_shards`, which makes the counters."""
    for holder in _step_holders(optimizer):
        if torch.is_tensor(holder.get("step")):
            holder["step"].fill_(step)
        else:
            holder["step"] = step


def _parts(optimizer: Any) -> Iterator[Any]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield part


def _adams(optimizer: Any) -> list[Any]:
    if isinstance(optimizer, HybridDeviceOptimizer):
        return optimizer.sub_optimizers
    return [optimizer]


def _stepped_by(optimizer: Any) -> dict[int, tuple[Tensor, Any]]:
    """id(tensor that Megatron gave to be stepped) -> (tensor that is stepped, Adam that does it)."""
    outer = getattr(optimizer, "inner_param_to_orig_param", {})
    return {
        id(outer.get(inner, inner)): (inner, adam)
        for adam in _adams(optimizer)
        for group in adam.param_groups
        for inner in group["params"]
    }


def _state(adam: Any, inner: Tensor) -> dict[str, Tensor]:
    state = adam.state[inner]
    for name in MOMENTS:
        if name not in state:
            state[name] = torch.zeros_like(inner, dtype=torch.float32)
    if isinstance(adam, TORCH_ADAM) and "step" not in state:
        # Fused kernels read it on the device that they run on.
        on_device = any(group["fused"] for group in adam.param_groups)
        state["step"] = torch.zeros((), device=inner.device if on_device else "cpu")
    return {name: state[name] for name in MOMENTS}


def _refresh(main: Tensor, inner: Tensor, is_weight: bool) -> Callable[[], None]:
    """Bring the copy of a main parameter that was not loaded up to the one that was."""

    def copy() -> None:
        source, target = (main, inner) if is_weight else (inner, main)
        target.detach().copy_(source.detach())

    return copy


def _step_holders(optimizer: Any) -> Iterator[dict[str, Any]]:
    for part in _parts(optimizer):
        for adam in _adams(part.optimizer):
            is_torch = isinstance(adam, TORCH_ADAM)
            yield from adam.state.values() if is_torch else adam.param_groups


def _main_parameters(part: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(parameter, what Adam steps in its place, first element of the parameter that this is)."""
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
