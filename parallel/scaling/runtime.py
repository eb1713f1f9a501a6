"""What the runtime takes beside the tensors: CUDA contexts, communicators, workspaces, fragmentation.

None of it has been measured with mrl. Each number is what others measured or what a library's source
says, and the row names it; the rest is called an assumption.

NCCL makes a communicator at the first collective of a group, and mrl never destroys one. Which groups
are used is counted in real training steps (tests/parallel/test_scaling_groups.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parallel.dims import ParallelDims
from parallel.scaling.engine import attention_ranks, graph_bytes
from parallel.scaling.rows import ASSUMPTION, Row
from parallel.scaling.shape import ModelShape
from parallel.scaling.stages import expert_data_parallel, is_expert
from parallel.scaling.workload import Workload

CONTEXT_BYTES = 600 << 20
"""Context of one process on one GPU. An empty one is 426 MiB (torch 2.10, CUDA 13, RTX 6000 Ada:
unslothai/unsloth-zoo pull 1053); kernels are loaded into it as they are first used."""
COLLECTIVE_BYTES = 576 << 20
"""A communicator of several ranks: Qwen3-30B-A3B's one in SGLang at TP8 (sgl-project/sglang pull 30908,
8 GB200, NCCL 2.30)."""
ALONE_BYTES = 388 << 20
"""A communicator of a single rank (sgl-project/sglang pull 35538, RTX 3060)."""
CHANNEL_BYTES = 12 << 20
"""One channel to one peer: buffers of 10 MiB and 2 MiB (NVIDIA/nccl issue 1685, 8 H100)."""
NVLINK_CHANNELS = 32
"""Channels to each peer of the node for all-to-all and send/receive (the same issue)."""
NETWORK_CHANNELS = 2
"""Channels to a peer on another node: NCCL_NCHANNELS_PER_NET_PEER (NVIDIA/nccl issue 1424)."""
CUBLAS_BYTES = 32 << 20
"""torch's workspace per cuBLAS handle and stream on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp,
parseChosenWorkspaceSize)."""
CUBLAS_STREAMS = 2
"""The default stream and one beside it (communication, offload)."""
GROUPED_GEMM_STREAMS = 4
"""TransformerEngine's grouped products, each with a cuBLAS workspace (`get_num_cublas_streams`)."""
FRAGMENTATION = 0.05
"""A share of the bytes that torch's caching allocator manages."""

Kind = Literal["collective", "peers"]


@dataclass(frozen=True)
class Communicator:
    """A communicator is a group of ranks that a step uses on the device."""

    name: str
    """Megatron's description of the group."""
    size: int
    span: int
    """Consecutive ranks that it stretches over."""
    kind: Kind = "collective"
    """`peers`: all-to-all or send and receive, with buffers for every peer."""

    def num_bytes(self, gpus_per_node: int) -> int:
        if self.size == 1:
            return ALONE_BYTES
        return COLLECTIVE_BYTES + CHANNEL_BYTES * self._channels(gpus_per_node)

    def _channels(self, gpus_per_node: int) -> int:
        if self.kind == "collective":
            return 0
        if "PIPELINE" in self.name:  # the stage before and the one after
            near = self.span <= gpus_per_node
            return min(2, self.size - 1) * (NVLINK_CHANNELS if near else NETWORK_CHANNELS)
        apart = max(1, self.span // self.size)
        near = min(self.size, max(1, gpus_per_node // apart))
        return (near - 1) * NVLINK_CHANNELS + (self.size - near) * NETWORK_CHANNELS


def communicators(shape: ModelShape, dims: ParallelDims, work: Workload) -> list[Communicator]:
    """List those of a trainer's rank on its first or last stage, by Megatron's names.

    Groups of a single rank count where Megatron calls a collective on them all the same. Those of the
    copies of experts are used where experts are trained.
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
    """List those of an engine's rank: its tensor-parallel group, and with DP attention that of a
    replica.

    SGLang's expert-parallel group is the tensor-parallel one where they are equal (sglang pull 30908).
    """
    ranks = attention_ranks(work)
    experts = work.engine_ep if work.engine_ep != work.engine_tp else 1
    found = [
        _several("engine tp", work.engine_tp, work.engine_tp),
        _several("engine attention tp", ranks if work.engine_dp > 1 else 1, ranks),
        _several("engine ep", experts, work.engine_tp),
        _several("engine moe tp", work.engine_tp // work.engine_ep if experts > 1 else 1,
                 work.engine_tp),
    ]  # fmt: skip
    return [each for each in found if each is not None]


def runtime_rows(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpus_per_node: int
) -> tuple[Row, ...]:
    """Held on one GPU in every phase, by the trainer and by an engine that sleeps."""
    own = communicators(shape, dims, work)
    theirs = engine_communicators(work)
    return (
        Row(
            "CUDA contexts",
            2 * CONTEXT_BYTES,
            f"2 processes (trainer, engine) x {CONTEXT_BYTES >> 20} MiB",
            f"{ASSUMPTION}: 426 MiB of an empty context (unsloth-zoo pull 1053) and loaded kernels",
        ),
        communicator_row("trainer's communicators", own, gpus_per_node),
        communicator_row("engine's communicators", theirs, gpus_per_node),
        Row(
            "matrix product workspaces",
            CUBLAS_BYTES * (2 * CUBLAS_STREAMS + GROUPED_GEMM_STREAMS),
            f"{CUBLAS_BYTES >> 20} MiB x (2 processes x {CUBLAS_STREAMS} streams, "
            f"{GROUPED_GEMM_STREAMS} streams of grouped products)",
            "torch CublasHandlePool.cpp (parseChosenWorkspaceSize); TransformerEngine gemm.py",
        ),
    )


def sleeping_graph_row(shape: ModelShape, work: Workload, stays: bool) -> Row:
    """The engine's graphs while it sleeps: gone where SGLANG_MEMORY_SAVER_CUDA_GRAPH=1."""
    return Row(
        "engine's CUDA graphs, asleep",
        graph_bytes(shape, work) if stays else 0,
        "released with the tag cuda_graph" if not stays else "as while it is awake",
        "sglang full_cuda_graph_backend.py (SGLANG_MEMORY_SAVER_CUDA_GRAPH)",
    )


def fragmentation_row(rows: tuple[Row, ...]) -> Row:
    """A share of everything that torch's allocator manages in a phase."""
    managed = sum(row.num_bytes for row in rows if row.managed)
    return Row(
        "fragmentation",
        int(FRAGMENTATION * managed),
        f"{FRAGMENTATION:.0%} of {managed} B that torch's allocator manages",
        f"{ASSUMPTION}: mrl empties the cache at every change of phase",
    )


def communicator_row(name: str, groups: list[Communicator], gpus_per_node: int) -> Row:
    """Add up the buffers of a rank's communicators."""
    parts = [
        f"{g.name.removesuffix('_GROUP').lower()} x{g.size} {g.num_bytes(gpus_per_node) >> 20}"
        for g in groups
    ]
    return Row(
        name,
        sum(g.num_bytes(gpus_per_node) for g in groups),
        f"{len(groups)} groups, MiB: {', '.join(parts)}"
        if groups
        else "an engine of one GPU has none",
        f"{ASSUMPTION}: NCCL buffers as measured in sglang pulls 30908, 35538 and nccl issue 1685",
    )
