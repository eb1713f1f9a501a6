"""Divide whole parameters among data-parallel ranks: each updates some and sends them to the others.

Megatron's distributed optimizer gives each data-parallel rank a range of a flattened buffer, which
may cut a matrix, and an orthogonalisation needs all of it. Here each rank keeps the optimizer state
of some whole parameters instead and updates only these; afterwards their new weights are broadcast.
Megatron's own LayerWiseDistributedOptimizer does the same, but comes with its form of Muon, which
needs NVIDIA's `emerging_optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.owners import assign

BUCKET_ELEMENTS = 1 << 25
"""Elements of new weights that one broadcast carries, unless a single parameter has more."""


@dataclass(frozen=True)
class Replicas:
    """Parameters that the same ranks have copies of, each kept and updated by one of them."""

    group: ProcessGroup
    owned: Sequence[Sequence[Tensor]]
    """The parameters of each rank of the group, in the same order on all of them."""


class LayerWiseOptimizer(ChainedOptimizer):
    """A chain whose parts have only the parameters that this rank updates.

    `step` is a collective of all ranks: it ends with the broadcast of all new weights.
    """

    def __init__(self, parts: list[Any], replicas: Sequence[Replicas]) -> None:
        super().__init__(parts)
        self.replicas = replicas
        everyone = parallel_state.get_intra_distributed_optimizer_instance_group()
        for part in parts:
            # Every parameter has one owner among all ranks, so the norm is a sum over all ranks.
            part.grad_stats_parallel_group = everyone

    @torch.no_grad()
    def step(self) -> tuple[bool, Any, Any]:
        found = super().step()
        if found[0]:
            for replicas in self.replicas:
                _broadcast(replicas)
        return found


def divide(chunks: list[Any], cost_of: Callable[[Tensor], int]) -> list[Replicas]:
    """Divide the trained dense parameters, and then those of experts, among the ranks with copies of
    them. `cost_of` gives the relative size of a parameter's optimizer state."""
    found = []
    trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    state: Any = parallel_state
    for is_expert, group in (
        (False, state.get_data_parallel_group(with_context_parallel=True)),
        (True, state.get_expert_data_parallel_group()),
    ):
        own = [p for p in trained if getattr(p, "allreduce", True) != is_expert]
        costs = [cost_of(parameter) for parameter in own]
        owned: list[list[Tensor]] = [[] for _ in range(group.size())]
        for parameter, rank in zip(own, assign(costs, group.size()), strict=True):
            owned[rank].append(parameter)
        if own:
            found.append(Replicas(group, owned))
    return found


@contextmanager
def frozen(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Hide parameters from Megatron, which makes no state for those without a gradient."""
    hidden = [p for p in parameters if p.requires_grad]
    for parameter in hidden:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in hidden:
            parameter.requires_grad = True


def _broadcast(replicas: Replicas) -> None:
    """Send the new weights of each rank to the others. A collective of the group."""
    group = replicas.group
    if group.size() == 1:
        return
    for rank, owned in enumerate(replicas.owned):
        source = dist.get_global_rank(group, rank)
        for bucket in _buckets(owned):
            if len(bucket) == 1:
                dist.broadcast(bucket[0].detach(), source, group=group)
                continue
            flat = torch.cat([p.detach().reshape(-1) for p in bucket])
            dist.broadcast(flat, source, group=group)
            if group.rank() == rank:
                continue
            for parameter, new in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.copy_(new.view(parameter.shape))


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters in runs of at most BUCKET_ELEMENTS elements and of one dtype."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        total = sum(p.numel() for p in bucket) + parameter.numel()
        if bucket and (total > BUCKET_ELEMENTS or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
