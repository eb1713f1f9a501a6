"""Memory other than tensors: CUDA contexts, communicators, workspaces, fragmentation.

None of these numbers has been measured with mrl. They are measurements by others, values from the
source code of a library, or assumptions; the source of each row says which.

NCCL creates a communicator at the first collective of a group, and mrl never destroys one.
tests/planner/test_bytes.py counts the groups that real training steps use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrl.planner.rows import ASSUMPTION, Row
from mrl.planner.shape import ModelShape
from mrl.planner.stages import expert_data_parallel, is_expert
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

CONTEXT_BYTES = 600 << 20
"""Bytes of one process's CUDA context on one GPU. An empty context takes 426 MiB (torch 2.10, CUDA 13,
RTX 6000 Ada: unslothai/unsloth-zoo pull 1053); kernels are loaded into it at their first use."""
COLLECTIVE_BYTES = 576 << 20
"""Bytes of a communicator of several ranks, as measured for Qwen3-30B-A3B in SGLang at TP8
(sgl-project/sglang pull 30908, 8 GB200, NCCL 2.30)."""
ALONE_BYTES = 388 << 20
"""Bytes of a communicator of a single rank (sgl-project/sglang pull 35538, RTX 3060)."""
CHANNEL_BYTES = 12 << 20
"""Bytes of one channel to one peer: buffers of 10 and 2 MiB (NVIDIA/nccl issue 1685, 8 H100)."""
NVLINK_CHANNELS = 32
"""Number of channels to each peer on the same node, for all-to-all and send/receive (NVIDIA/nccl issue
1685)."""
NETWORK_CHANNELS = 2
"""Number of channels to each peer on another node: NCCL_NCHANNELS_PER_NET_PEER (NVIDIA/nccl issue
1424)."""
CUBLAS_BYTES = 32 << 20
"""Bytes of torch's workspace per cuBLAS handle and stream on Hopper
(aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize)."""
CUBLAS_STREAMS = 2
"""Number of streams with a cuBLAS workspace: the default one, and one for communication or offload."""
GROUPED_GEMM_STREAMS = 4
"""Number of streams of TransformerEngine's grouped matrix products (`get_num_cublas_streams`). Each
of these streams has a cuBLAS workspace."""
FRAGMENTATION = 0.05
"""Bytes that fragmentation adds, as a share of the bytes that torch's caching allocator manages."""

Kind = Literal["collective", "peers"]


@dataclass(frozen=True)
class Communicator:
    """An NCCL communicator that a step uses, and its group of ranks."""

    name: str
    """Megatron's description of the group."""
    size: int
    """Number of ranks in the group."""
    span: int
    """Number of consecutive ranks from the group's first rank to its last."""
    kind: Kind = "collective"
    """`peers` for all-to-all or send and receive, which need buffers for every peer; `collective`
    for other collectives."""

    def num_bytes(self, gpus_per_node: int) -> int:
        """Return the bytes of the communicator's buffers on one GPU."""
        if self.size == 1:
            return ALONE_BYTES
        return COLLECTIVE_BYTES + CHANNEL_BYTES * self._channels(gpus_per_node)

    def _channels(self, gpus_per_node: int) -> int:
        if self.kind == "collective":
            return 0
        if "PIPELINE" in self.name:  # the peers are the previous and the next stage
            near = self.span <= gpus_per_node
            return min(2, self.size - 1) * (NVLINK_CHANNELS if near else NETWORK_CHANNELS)
        apart = max(1, self.span // self.size)
        near = min(self.size, max(1, gpus_per_node // apart))
        return (near - 1) * NVLINK_CHANNELS + (self.size - near) * NETWORK_CHANNELS


def communicators(shape: ModelShape, dims: ParallelDims, work: Workload) -> list[Communicator]:
    """Return the communicators of a trainer rank on the first or last stage, with Megatron's names.

    A group of a single rank is listed only if Megatron calls collectives on it. The groups of
    expert-data parallelism are used only if experts are trained.
    """
    replicas, expert_span = dims.world // dims.pp, dims.etp * dims.ep
    has_experts, trains_experts = shape.num_experts > 0, shape.num_experts > 0
    if shape.adapter:
        trains_experts = any(is_expert(part) for part in shape.adapter.parts)
    found = [
        Communicator("default_pg", dims.world, dims.world) if dims.world > 1 else None,
        _several("TENSOR_MODEL_PARALLEL_GROUP", dims.tp, dims.tp),
        _several("CONTEXT_PARALLEL_GROUP", dims.cp, dims.tp * dims.cp),
        _several("PIPELINE_MODEL_PARALLEL_GROUP", dims.pp, dims.world, "peers"),
        _several("EMBEDDING_GROUP", 2 if shape.tied and dims.pp > 1 else 1, dims.world),
        Communicator("DATA_PARALLEL_GROUP_WITH_CP", dims.dp * dims.cp, replicas),
    ]
    if has_experts:
        kind: Kind = "collective" if dims.dispatcher == "allgather" else "peers"
        found += [
            _several("EXPERT_MODEL_PARALLEL_GROUP", dims.ep, expert_span, kind),
            _several("EXPERT_TENSOR_PARALLEL_GROUP", dims.etp, dims.etp),
            _several("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", expert_span, expert_span),
        ]
    if trains_experts:
        copies = expert_data_parallel(dims)
        found.append(Communicator("EXPERT_DATA_PARALLEL_GROUP", copies, replicas))
    if shape.expert_bias:
        found.append(_several("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", replicas, replicas))
    if work.distributed_optimizer:
        name = "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
        found.append(Communicator(name, dims.world, dims.world))
    else:
        found.append(Communicator("MODEL_PARALLEL_GROUP", dims.tp * dims.pp, dims.world))
        if trains_experts:
            name, size = "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", expert_span * dims.pp
            found.append(Communicator(name, size, dims.world))
    return [each for each in found if each is not None]


def _several(name: str, size: int, span: int, kind: Kind = "collective") -> Communicator | None:
    return Communicator(name, size, span, kind) if size > 1 else None


def engine_communicators(work: Workload) -> list[Communicator]:
    """Return the communicators of an engine rank.

    Their groups are the tensor-parallel group, the ranks of an attention replica under DP attention,
    and the groups for experts. SGLang uses the tensor-parallel group for expert parallelism if both
    have the same ranks (sglang pull 30908).
    """
    ranks = work.attention_ranks
    experts = work.engine_ep if work.engine_ep != work.engine_tp else 1
    found = [
        _several("engine tp", work.engine_tp, work.engine_tp),
        _several("engine attention tp", ranks if work.engine_dp > 1 else 1, ranks),
        _several("engine ep", experts, work.engine_tp),
        _several("engine moe tp", work.engine_tp // work.engine_ep if experts > 1 else 1,
                 work.engine_tp),
    ]  # fmt: skip
    return [each for each in found if each is not None]


def worker_pair(dims: ParallelDims, work: Workload) -> Communicator:
    """Return the communicator of a trainer rank and a worker (`mrl.weight_sync.pair_group`)."""
    return Communicator("weights to an engine", 2, dims.world + work.rollout_ranks, "peers")


def runtime_rows(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpus_per_node: int
) -> tuple[Row, ...]:
    """Return the rows of contexts, communicators and workspaces on the GPU of a trainer rank.

    A trainer rank of a disaggregated run has one communicator with each worker to which it sends
    weights. In a colocated run the rows also cover the engine, except for its CUDA graphs, which a
    sleeping engine releases (SGLANG_MEMORY_SAVER_CUDA_GRAPH=1).
    """
    groups = communicators(shape, dims, work)
    if work.rollout_ranks:
        groups += [worker_pair(dims, work)] * -(-work.num_engines(dims) // dims.world)
        return (
            context_row(1, f"1 x {CONTEXT_BYTES >> 20} MiB: the trainer"),
            communicator_row("trainer's communicators", groups, gpus_per_node),
            workspace_row(CUBLAS_STREAMS, f"{CUBLAS_STREAMS} streams", has_grouped=True),
        )
    return (
        context_row(2, f"2 processes (trainer, engine) x {CONTEXT_BYTES >> 20} MiB"),
        communicator_row("trainer's communicators", groups, gpus_per_node),
        communicator_row("engine's communicators", engine_communicators(work), gpus_per_node),
        workspace_row(
            2 * CUBLAS_STREAMS, f"2 processes x {CUBLAS_STREAMS} streams", has_grouped=True
        ),
    )


def context_row(num: int, formula: str) -> Row:
    """Return the row of the CUDA contexts of `num` processes; `formula` says how `num` is computed."""
    source = f"{ASSUMPTION}: 426 MiB of an empty context (unsloth-zoo pull 1053) and loaded kernels"
    return Row("CUDA contexts", num * CONTEXT_BYTES, formula, source)


def workspace_row(num_streams: int, formula: str, *, has_grouped: bool) -> Row:
    """Return the row of the cuBLAS workspaces of `num_streams` streams.

    `formula` says in words how `num_streams` is computed. If `has_grouped`, the streams of
    TransformerEngine's grouped matrix products are added to the number and to the formula.
    """
    source = "torch CublasHandlePool.cpp (parseChosenWorkspaceSize)"
    if has_grouped:
        num_streams += GROUPED_GEMM_STREAMS
        formula = f"({formula}, {GROUPED_GEMM_STREAMS} streams of grouped products)"
        source += "; TransformerEngine gemm.py"
    formula = f"{CUBLAS_BYTES >> 20} MiB x {formula}"
    return Row("matrix product workspaces", num_streams * CUBLAS_BYTES, formula, source)


def fragmentation_row(rows: tuple[Row, ...]) -> Row:
    """Return the row of fragmentation: a fixed share of the bytes that torch's allocator manages."""
    managed = sum(row.num_bytes for row in rows if row.managed)
    return Row(
        "fragmentation",
        int(FRAGMENTATION * managed),
        f"{FRAGMENTATION:.0%} of {managed} B that torch's allocator manages",
        f"{ASSUMPTION}: mrl empties the cache at every change of phase",
    )


def communicator_row(name: str, groups: list[Communicator], gpus_per_node: int) -> Row:
    """Return the row of the buffers of a rank's communicators."""
    parts = [
        f"{g.name.removesuffix('_GROUP').lower()} x{g.size} {g.num_bytes(gpus_per_node) >> 20}"
        for g in groups
    ]
    return Row(
        name,
        sum(g.num_bytes(gpus_per_node) for g in groups),
        f"{len(groups)} groups, MiB: {', '.join(parts)}" if groups else "none with one GPU",
        f"{ASSUMPTION}: NCCL buffers as measured in sglang pulls 30908, 35538 and nccl issue 1685",
    )
