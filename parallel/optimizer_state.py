"""Adam's state by parameter, whichever of Megatron's optimizers holds it.

Megatron keeps the state in three shapes: beside the parameter itself (FP32Optimizer), beside an fp32
main parameter (Float16OptimizerWithFloat16Params), or only for a range of the flattened shard that
this data-parallel rank owns (DistributedOptimizer). Here they are one: a range, and tensors over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

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


def optimizer_shards(optimizer: Any) -> dict[int, OptimizerShard]:
    """`id(parameter)` -> its state. Moments that the first step has not made yet become zeros."""
    shards = {}
    for part in _parts(optimizer):
        sharded = isinstance(part, DistributedOptimizer)
        for parameter, main, start in _main_parameters(part):
            state = part.optimizer.state[main]
            for name in MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(main, dtype=torch.float32)
            if isinstance(part.optimizer, TORCH_ADAM) and "step" not in state:
                state["step"] = torch.tensor(0.0)
            tensors = {name: state[name] for name in MOMENTS}
            if parameter.dtype != torch.float32:
                tensors["main"] = main.detach()
            shards[id(parameter)] = OptimizerShard(start, tensors, sharded)
    return shards


def get_step(optimizer: Any) -> int:
    """Adam steps done: one number, as every parameter takes part in every step."""
    steps = {int(holder["step"]) for holder in _step_holders(optimizer) if "step" in holder}
    if len(steps) > 1:
        raise ValueError(f"parameters were stepped a different number of times: {sorted(steps)}")
    return steps.pop() if steps else 0


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


def _step_holders(optimizer: Any) -> Iterator[dict[str, Any]]:
    for part in _parts(optimizer):
        inner = part.optimizer
        yield from inner.state.values() if isinstance(inner, TORCH_ADAM) else inner.param_groups


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
