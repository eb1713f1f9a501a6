"""Export the whole model under HF names from any layout, in buckets of bounded size.

Parameters are assigned to buckets by their shapes, before any data is sent. There are two buffers,
so that an engine can read one bucket while the next is filled. To fill a bucket, each parameter is
gathered over its expert- and tensor-parallel peers, and the pieces are copied to their positions in
the buffer. Every rank gets every bucket. In addition to the two buffers a rank holds its shards of
the weights, and the peers' pieces of one parameter.
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
"""(the tensors of a bucket, a dict from module name to the digest of the module's weights in the
bucket). Modules are named as in `mrl.kernels.digest.digest_place`."""


def num_bytes(tensor: HfTensor) -> int:
    _, shape, dtype = tensor
    return shape.numel() * dtype.itemsize


@dataclass(frozen=True)
class Unit:
    """One parameter of this pipeline stage, together with its counterparts on the expert-parallel
    peers. All of them are gathered together."""

    entry: Entry
    tensors: list[HfTensor]
    """The HF tensors of all expert-parallel peers, sorted by peer. Those of one peer are in the
    order of the names in the rule."""
    merged: bool = False
    """Whether the low-rank update (the adapter) of the parameter's layer is added to the weight."""

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(tensor) for tensor in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0][2]

    def shard(self) -> Tensor:
        """Return this rank's shard as it is sent: with the update added if `merged`, and cast to
        the dtype of the export."""
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
    """Yield every HF tensor exactly once on every rank, in buckets of up to `max_bytes`.

    A collective: every rank must exhaust the iterator. Buckets come in the order of pipeline
    stages. If a parameter and its counterparts on the expert-parallel peers together are larger
    than `max_bytes`, they get a bucket of their own. There are two buffers, so a bucket is
    overwritten when the second bucket after it is requested. On CPUs the buffers are in `memory`,
    or in new shared memory if `memory` is None.

    `dtype`: the dtype to which tensors are cast; None keeps their dtype. Each rank casts its shard
    before it computes the digest, so the digest is that of the bytes that are sent. Megatron's
    buffers (expert biases) keep their dtype, as they do in engines. `merged`: whether the low-rank
    updates of the adapter are added to the weights.
    """
    mesh = weights.mesh
    buckets = _assign_buckets(weights, max_bytes, dtype, merged)
    start = time.perf_counter()
    digests = _digests(weights, buckets)
    digest_s = time.perf_counter() - start
    buffers = _buffers(weights, buckets, memory or SharedMemory())
    own = _headers(buckets, digests)
    stages = [_from_stage(weights, own, stage) for stage in range(mesh.dims.pp)]
    left = sum(map(len, stages))  # a stage without any part of the adapter sends none
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
            digest_s = 0.0  # all digests were computed before the first bucket


def model_bytes(weights: WeightMap, dtype: torch.dtype | None) -> int:
    """Estimate the number of bytes of an export: the bytes of this pipeline stage's parameters
    times the number of stages. Not a collective."""
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
    """Return two buffers, or one if the export is a single bucket, as (buffer, path of its file).
    On GPUs the path is None.

    The buffers have the size of the largest bucket, so that no buffer has to be replaced by a
    larger one while a consumer still reads it. On GPUs an IPC handle that no engine opens keeps its
    buffer alive until this process ends (torch/csrc/CudaIPCTypes.cpp), so an engine that fails
    during a weight sync leaks the buffers of that sync.
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
    """Return the digests of each bucket of this stage, by module.

    Each rank computes digests of its own shards, and these digests are summed over the ranks. So
    they describe the weights before anything is gathered, copied or sent.
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
    """Yield (module, digest) for the tensors of a unit. `of_peers` has the unit's digest on each
    expert-parallel peer.

    An expert's unit has a different expert on each peer, so it yields one pair per peer. Any
    other parameter is the same on all peers, so its unit yields one pair.
    """
    entry = unit.entry
    digests = of_peers if entry.expert >= 0 else [of_peers[weights.mesh.ep_rank]]
    for expert, digest in zip(_experts(weights, entry), digests, strict=True):
        yield digest_place(entry.hf_names(expert)[0]), digest


def _own_sums(weights: WeightMap, units: list[Unit]) -> Tensor:
    """Return i64[units]: for each unit the digest sum of this rank's shard. Does not wait for the
    device.

    If all tensor-parallel ranks hold a parameter completely, only the first of them counts it.
    Shards are cast about CHUNK elements at a time.
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
    """Return the size in bytes of the largest bucket of all pipeline stages."""
    mesh = weights.mesh
    sizes = (sum(unit.num_bytes for unit in bucket) for bucket in buckets)
    largest = torch.tensor(max(sizes, default=0)).to(mesh.device)
    if mesh.dims.pp > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.pp)
    return int(largest)


def _assign_buckets(
    weights: WeightMap, max_bytes: int, dtype: torch.dtype | None, merged: bool
) -> list[list[Unit]]:
    """Assign this stage's units to buckets of up to `max_bytes`, each with a single dtype."""
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
    """Return, for each expert-parallel peer, the global index of the expert it holds for this entry.

    Returns [-1] for a parameter that is not an expert's.
    """
    if entry.expert < 0:
        return [-1]
    mesh = weights.mesh
    return [
        entry.expert + (peer - mesh.ep_rank) * weights.num_local_experts
        for peer in range(mesh.dims.ep)
    ]


def _gather(weights: WeightMap, unit: Unit, views: list[Tensor]) -> None:
    """Gather one unit from the peers, and write it into `views`, one view of the buffer for each of
    the unit's HF tensors."""
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
    """Split one tensor-parallel shard of a parameter into one piece for each of its HF tensors."""
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
    """Return, on every rank, the headers of the buckets that a pipeline stage is going to send."""
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
