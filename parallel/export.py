"""This module sends the whole model under HF names from any layout, in buckets of bounded size.

Buckets are decided from shapes alone, before anything moves. They are laid into two buffers in turn, so
that an engine reads one while the next is built: each parameter is gathered over its expert- and
tensor-parallel peers and its pieces are copied to where they belong. A rank holds its shard, the two
buffers, and the peers' pieces of one parameter. Every rank holds the whole bucket.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.kernels.digest import CHUNK, add_digests, digest_place, weight_sums
from mrl.system.shared_memory import SharedMemory
from mrl.types import WeightBucket
from parallel.shards import split
from parallel.weights import Entry, WeightMap

NUM_BUFFERS = 2
HfTensor = tuple[str, torch.Size, torch.dtype]
Header = tuple[list[HfTensor], dict[str, int]]
"""What is in a bucket, and its digests by place."""


def num_bytes(tensor: HfTensor) -> int:
    _, shape, dtype = tensor
    return shape.numel() * dtype.itemsize


@dataclass(frozen=True)
class Unit:
    """A `Unit` is one parameter of this stage with its expert-parallel peers, gathered in one go."""

    entry: Entry
    tensors: list[HfTensor]
    """Peer after peer, in the order of the rule's HF names."""
    merged: bool = False
    """Whether the low-rank update of its layer is added."""

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(tensor) for tensor in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0][2]

    def shard(self) -> Tensor:
        """This rank's, as it is sent: of one parameter at a time, where it has to be cast."""
        own = self.entry.parameter.detach()
        if self.merged and self.entry.update is not None:
            own = own.float() + self.entry.update.matrix()
        return own.to(self.dtype)


@torch.no_grad()
def export_buckets(
    weights: WeightMap,
    version: int,
    max_bytes: int,
    memory: SharedMemory | None = None,
    dtype: torch.dtype | None = None,
    *,
    merged: bool = False,
) -> Iterator[WeightBucket]:
    """Yield every HF tensor exactly once, in buckets of up to `max_bytes`, on every rank.

    In `dtype` where one is given: each rank casts its shard first, so that what it digests is what
    is sent. Buffers keep their own, as engines keep them. `merged` adds the low-rank updates.

    A parameter that is larger, counted with its expert-parallel peers, is a bucket of its own. A
    bucket's tensors are overwritten when the next but one is asked for. A collective: every rank must
    drain the iterator. Stage after stage in pipeline order. On CPUs the buckets lie in `memory`.
    """
    mesh = weights.mesh
    buckets = _assign_buckets(weights, max_bytes, dtype, merged)
    start = time.perf_counter()
    digests = _digests(weights, buckets)
    digest_s = time.perf_counter() - start
    buffers = _buffers(weights, buckets, memory or SharedMemory())
    own = _headers(buckets, digests)
    stages = [_from_stage(weights, own, stage) for stage in range(mesh.dims.pp)]
    left = sum(map(len, stages))  # a stage may have none: of an adapter it may hold nothing
    for stage, headers in enumerate(stages):
        mine = stage == mesh.pp_rank
        for number, (header, digest) in enumerate(headers):
            buffer, path = buffers[left % len(buffers)]
            left -= 1
            flat = buffer[: sum(num_bytes(tensor) for tensor in header)]
            views = _views(flat, header)
            if mine:
                rest = iter(views)
                for unit in buckets[number]:
                    _gather(weights, unit, [next(rest) for _ in unit.tensors])
            if mesh.dims.pp > 1:
                dist.broadcast(flat, dist.get_global_rank(mesh.pp, stage), mesh.pp)
            tensors = [(name, view) for (name, _, _), view in zip(header, views, strict=True)]
            yield WeightBucket(
                tensors,
                version,
                flat=flat,
                is_last=left == 0,
                shared_path=path,
                digest=digest,
                digest_s=digest_s,
            )
            digest_s = 0.0  # all of them were taken before the first bucket


def model_bytes(weights: WeightMap, dtype: torch.dtype | None) -> int:
    """About what an export sends: this stage's share, times the number of stages. Nothing is asked."""
    mesh, total = weights.mesh, 0
    for entry in weights.entries:
        parameter = entry.parameter
        sent = parameter.dtype if dtype is None or entry.rule.is_buffer else dtype
        ways = weights.tp_place(entry)[1] * (mesh.dims.ep if entry.expert >= 0 else 1)
        total += parameter.numel() * sent.itemsize * ways
    return total * mesh.dims.pp


def _buffers(
    weights: WeightMap, buckets: list[list[Unit]], memory: SharedMemory
) -> list[tuple[Tensor, str | None]]:
    """Each with its file, on CPUs; only one where there is only one bucket.

    As large as the largest bucket: growing a buffer would keep the old one alive in the hands of the
    consumer. On GPUs a handle that no engine opens keeps its buffer until this process ends
    (torch/csrc/CudaIPCTypes.cpp): an engine that fails costs the buffers of that sync.
    """
    device, size = weights.mesh.device, _largest(weights, buckets)
    number = 1 if weights.mesh.dims.pp == 1 and len(buckets) == 1 else NUM_BUFFERS
    if device.type != "cpu":
        return [(torch.empty(size, dtype=torch.uint8, device=device), None) for _ in range(number)]
    shared = [memory.take(size, index) for index in range(number)]
    return [(one.tensor, one.path) for one in shared]


def _headers(buckets: list[list[Unit]], digests: list[dict[str, int]]) -> list[Header]:
    tensors = ([tensor for unit in bucket for tensor in unit.tensors] for bucket in buckets)
    return list(zip(tensors, digests, strict=True))


def _digests(weights: WeightMap, buckets: list[list[Unit]]) -> list[dict[str, int]]:
    """Return the digests of each bucket of this stage, by place.

    Each rank reads its own shards where they are, and the sums are added up: neither gathering,
    copying nor sending can hide from them.
    """
    mesh = weights.mesh
    units = [unit for bucket in buckets for unit in bucket]
    sums = _own_sums(weights, units)
    experts = [unit.entry.expert >= 0 for unit in units]
    is_expert = torch.tensor(experts, dtype=torch.bool, device=mesh.device)
    for rows, group in ((~is_expert, mesh.tp), (is_expert, mesh.etp)):
        if group.size() > 1:
            part = sums[rows]
            dist.all_reduce(part, group=group)
            sums[rows] = part
    rows = iter(torch.stack(_all_gather(sums, mesh.ep), dim=1).tolist())
    return [
        add_digests(part for unit in bucket for part in _by_place(weights, unit, next(rows)))
        for bucket in buckets
    ]


def _by_place(weights: WeightMap, unit: Unit, of_peers: list[int]) -> Iterator[tuple[str, int]]:
    """(place, digest) of a unit; expert-parallel peers hold other experts, or copies of the rest."""
    entry = unit.entry
    digests = of_peers if entry.expert >= 0 else [of_peers[weights.mesh.ep_rank]]
    for expert, digest in zip(_experts(weights, entry), digests, strict=True):
        yield digest_place(entry.hf_names(expert)[0]), digest


def _own_sums(weights: WeightMap, units: list[Unit]) -> Tensor:
    """i64[units] of this rank's shards; what all tensor-parallel ranks hold counts on one.

    Nothing waits for the device. Shards that have to be cast are cast about CHUNK elements at a time.
    """
    mesh = weights.mesh
    sums = torch.zeros(len(units), dtype=torch.int64, device=mesh.device)
    batch: list[tuple[int, Tensor]] = []
    size = 0
    for number, unit in enumerate(units):
        rank = mesh.etp_rank if unit.entry.expert >= 0 else mesh.tp_rank
        if weights.tp_place(unit.entry)[1] > 1 or rank == 0:
            shard = unit.shard()
            batch.append((number, shard))
            size += shard.numel()
        if size >= CHUNK or unit is units[-1]:
            places = torch.tensor([place for place, _ in batch], dtype=torch.int64)
            sums[places.to(sums.device)] = weight_sums([(shard, 1) for _, shard in batch]).to(
                sums.device
            )
            batch, size = [], 0
    return sums


def _largest(weights: WeightMap, buckets: list[list[Unit]]) -> int:
    """Bytes of the largest bucket of any pipeline stage."""
    mesh = weights.mesh
    sizes = (sum(unit.num_bytes for unit in bucket) for bucket in buckets)
    largest = torch.tensor(max(sizes, default=0)).to(mesh.device)
    if mesh.dims.pp > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.pp)
    return int(largest)


def _assign_buckets(
    weights: WeightMap, max_bytes: int, dtype: torch.dtype | None, merged: bool
) -> list[list[Unit]]:
    """Assign this stage's units to buckets of one dtype each."""
    made = (_unit(weights, entry, dtype, merged) for entry in weights.entries)
    units = sorted(made, key=lambda unit: str(unit.dtype))
    buckets: list[list[Unit]] = []
    size = 0
    for unit in units:
        fits = size + unit.num_bytes <= max_bytes
        if not buckets or not fits or unit.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(unit)
        size += unit.num_bytes
    return buckets


def _unit(weights: WeightMap, entry: Entry, dtype: torch.dtype | None, merged: bool) -> Unit:
    own = entry.parameter.dtype
    sent = own if dtype is None or entry.rule.is_buffer else dtype
    local = torch.empty(entry.parameter.shape, dtype=sent, device="meta")
    _, size = weights.tp_place(entry)
    shapes = []
    for piece in _split_hf(weights, entry, local):
        shape = list(piece.shape)
        shape[entry.rule.shard_dim] *= size
        shapes.append(torch.Size(shape))
    return Unit(
        entry,
        [
            (name, shape, local.dtype)
            for expert in _experts(weights, entry)
            for name, shape in zip(entry.hf_names(expert), shapes, strict=True)
        ],
        merged,
    )


def _experts(weights: WeightMap, entry: Entry) -> list[int]:
    """The global expert of each expert-parallel peer: the same place in its own block of experts."""
    if entry.expert < 0:
        return [-1]
    mesh = weights.mesh
    return [
        entry.expert + (peer - mesh.ep_rank) * weights.num_local_experts
        for peer in range(mesh.dims.ep)
    ]


def _gather(weights: WeightMap, unit: Unit, views: list[Tensor]) -> None:
    """Fill the HF tensors of one unit."""
    mesh, entry, local = weights.mesh, unit.entry, unit.shard()
    is_expert = entry.expert >= 0
    peers = _all_gather(local, mesh.ep) if is_expert else [local]
    _, size = weights.tp_place(entry)
    rest = iter(views)
    for peer in peers:
        shards = _all_gather(peer, mesh.etp if is_expert else mesh.tp) if size > 1 else [peer]
        mine = [next(rest) for _ in entry.rule.hf]
        for rank, shard in enumerate(shards):
            for view, piece in zip(mine, _split_hf(weights, entry, shard), strict=True):
                dim = entry.rule.shard_dim
                width = piece.shape[dim]
                view.narrow(dim, rank * width, width).copy_(piece)


def _split_hf(weights: WeightMap, entry: Entry, shard: Tensor) -> list[Tensor]:
    """One tensor-parallel shard -> the same part of each of its HF tensors."""
    _, size = weights.tp_place(entry)
    return split(shard, entry.rule.split, weights.num_groups // size, weights.heads_per_group)


def _views(flat: Tensor, header: list[HfTensor]) -> list[Tensor]:
    views, start = [], 0
    for tensor in header:
        _, shape, dtype = tensor
        end = start + num_bytes(tensor)
        views.append(flat[start:end].view(dtype).view(shape))
        start = end
    return views


def _from_stage(weights: WeightMap, headers: list[Header], stage: int) -> list[Header]:
    """What a pipeline stage is about to send, on every rank."""
    group = weights.mesh.pp
    if group.size() == 1:
        return headers
    box = [headers]
    dist.broadcast_object_list(box, dist.get_global_rank(group, stage), group)
    return box[0]


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
