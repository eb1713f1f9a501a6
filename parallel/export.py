"""The whole model under HF names, from any layout, a bounded number of bytes at a time.

Every rank holds its own shard, one full parameter and two buckets at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.types import WeightBucket
from parallel.shards import join_shards, split
from parallel.weights import Entry, WeightMap


@torch.no_grad()
def export_buckets(weights: WeightMap, version: int, max_bytes: int) -> Iterator[WeightBucket]:
    """Every HF tensor exactly once, in buckets of about `max_bytes`, on every rank.

    A collective: every rank must drain the iterator. Stage after stage in pipeline order.
    """
    groups = weights.groups
    for stage in range(groups.dims.pp):
        mine = stage == groups.pp_rank
        buckets = _buckets(_stage_tensors(weights), max_bytes) if mine else None
        while True:
            tensors = next(buckets, []) if buckets is not None else []
            tensors = _broadcast(weights, tensors, stage)
            if not tensors:
                break
            yield WeightBucket(tensors, version)


def _stage_tensors(weights: WeightMap) -> Iterator[tuple[str, Tensor]]:
    """This pipeline stage's parameters, gathered over tensor and expert parallel ranks."""
    groups = weights.groups
    for entry in weights.entries:
        _, size = weights.tp_place(entry)
        local = entry.parameter.detach()
        group = groups.tp if entry.expert < 0 else groups.etp
        shards = _all_gather(local, group) if size > 1 else [local]
        full = join_shards(shards, entry.rule.split)
        if entry.expert < 0:
            yield from zip(entry.hf_names(), _split_hf(weights, entry, full), strict=True)
            continue
        # Peers hold the same place in their own block of experts.
        for peer, whole in enumerate(_all_gather(full, groups.ep)):
            expert = entry.expert + (peer - groups.ep_rank) * weights.num_local_experts
            yield from zip(entry.hf_names(expert), _split_hf(weights, entry, whole), strict=True)


def _split_hf(weights: WeightMap, entry: Entry, full: Tensor) -> list[Tensor]:
    return split(full, entry.rule.split, weights.num_groups, weights.heads_per_group)


def _broadcast(
    weights: WeightMap, tensors: list[tuple[str, Tensor]], stage: int
) -> list[tuple[str, Tensor]]:
    """One bucket from a pipeline stage to all: names and shapes, then one flat tensor."""
    group = weights.groups.pp
    if group.size() == 1:
        return tensors
    source = dist.get_global_rank(group, stage)
    header = [[(name, tuple(t.shape), t.dtype) for name, t in tensors]]
    dist.broadcast_object_list(header, src=source, group=group)
    if not header[0]:
        return []
    counts = [torch.Size(shape).numel() for _, shape, _ in header[0]]
    dtype = header[0][0][2]
    if tensors:
        flat = torch.cat([t.reshape(-1) for _, t in tensors])
    else:
        flat = torch.empty(sum(counts), dtype=dtype, device=weights.groups.device)
    dist.broadcast(flat, src=source, group=group)
    parts = flat.split(counts)
    return [(n, p.view(s)) for (n, s, _), p in zip(header[0], parts, strict=True)]


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _buckets(
    tensors: Iterator[tuple[str, Tensor]], max_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of one dtype, up to `max_bytes` together (a larger one goes alone)."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (size + num_bytes > max_bytes or tensor.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket
