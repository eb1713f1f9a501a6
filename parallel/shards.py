"""How one parameter is put together and shared out: pure functions on tensors.

HF tensors <-> the whole Megatron tensor (`join`, `split`) -> one of its tensor-parallel shards
(`take_shard`). The kinds are those of `parallel.architectures.base.Split`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.architectures.base import Split


def join(parts: list[Tensor], kind: Split, num_groups: int) -> Tensor:
    """Join the HF tensors of one parameter to the whole Megatron tensor."""
    if kind == "qkv":
        grouped = [p.unflatten(0, (num_groups, -1)) for p in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def split(full: Tensor, kind: Split, num_groups: int, heads_per_group: int) -> list[Tensor]:
    """Split the whole Megatron tensor into its HF tensors: the inverse of `join`."""
    if kind == "gated":
        return list(full.chunk(2))
    if kind != "qkv":
        return [full]
    grouped = full.unflatten(0, (num_groups, heads_per_group + 2, -1))
    parts = grouped.split([heads_per_group, 1, 1], dim=1)
    return [p.flatten(0, 2).contiguous() for p in parts]


def take_shard(full: Tensor, kind: Split, rank: int, size: int) -> Tensor:
    """The part of a whole Megatron tensor that tensor-parallel `rank` of `size` holds."""
    if size == 1 or kind == "none":
        return full
    if kind == "gated":
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, dim=1 if kind == "columns" else 0)[rank]
