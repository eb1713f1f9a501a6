"""The bytes of a disaggregated run's roles are counted here: trainer ranks, and ranks of engines.

A trainer rank has no engine beside it: its weights and optimizer state stay on the device through the
whole step, also while weights are sent. A rollout rank has no trainer beside it: its engine is always
awake. The first rank of an engine also has a worker, which receives weights over a communicator of two
and keeps versions of them in the host's memory (`mrl/disaggregated/staging.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.dims import ParallelDims
from parallel.scaling.engine import engine_host_rows, engine_rows
from parallel.scaling.engine_adapter import adapter_pool_rows
from parallel.scaling.host import PROCESS_BYTES, node_rows, routes_per_token, trainer_host_rows
from parallel.scaling.memory import (
    export_buffer_bytes,
    export_row,
    pass_rows,
    phases,
    trainer_rows,
)
from parallel.scaling.rows import ASSUMPTION, Phase, Row, present, times, total
from parallel.scaling.runtime import (
    CONTEXT_BYTES,
    CUBLAS_BYTES,
    CUBLAS_STREAMS,
    GROUPED_GEMM_STREAMS,
    Communicator,
    communicator_row,
    communicators,
    engine_communicators,
    fragmentation_row,
)
from parallel.scaling.shape import ModelShape
from parallel.scaling.stages import Stage, stages
from parallel.scaling.state import optimizer_shard, step_rows
from parallel.scaling.workload import Workload

SUPERVISOR_BYTES = 2 << 30
"""Libraries and Python objects of the process that a launcher starts on a rollout rank."""
HELD_TOKEN_BYTES = 32
"""Bytes that a token of a sample takes in a process beside its routes."""


@dataclass(frozen=True)
class Node:
    """A node is full of ranks in their order; the last one may have room left."""

    num_trainers: int
    num_rollout: int
    rows: tuple[Row, ...]

    def describe(self) -> str:
        """Return the ranks in words; empty where trainers and engines share them."""
        kinds = [("trainer", self.num_trainers), ("rollout", self.num_rollout)]
        return " and ".join(f"{num} {kind} rank(s)" for kind, num in kinds if num)


def all_phases(
    shape: ModelShape, dims: ParallelDims, work: Workload, device_bytes: int, gpus_per_node: int = 8
) -> list[Phase]:
    """List the phases of a step in either placement; the last one is the rollout rank's, if any."""
    if not work.rollout_ranks:
        return phases(shape, dims, work, device_bytes, gpus_per_node)
    found = [
        phase
        for stage in stages(shape, dims)
        for phase in _trainer_phases(shape, stage, dims, work, gpus_per_node)
    ]
    return [*found, rollout_phase(shape, dims, work, device_bytes, gpus_per_node)]


def _trainer_phases(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, gpus_per_node: int
) -> list[Phase]:
    own = trainer_rows(shape, stage, dims, work)
    shard = optimizer_shard(stage, dims, work.distributed_optimizer)
    contents = {
        "sync": (export_row(shape, dims, work),),
        "log-probs": pass_rows(shape, stage, dims, work, training=False),
        "train": pass_rows(shape, stage, dims, work, training=True),
        "update": tuple(step_rows(shard, work.state, work.weight_bytes)),
    }
    runtime = trainer_runtime_rows(shape, dims, work, gpus_per_node)
    host = present(trainer_host_rows(shape, stage, dims, work))
    found = []
    for name, added in contents.items():
        rows = (*own, *added, *runtime)
        device = present((*rows, fragmentation_row(rows)))
        found.append(Phase(name, stage.index, device, host, "trainer"))
    return found


def trainer_runtime_rows(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpus_per_node: int
) -> tuple[Row, ...]:
    """List what the runtime holds on a trainer rank; each serves its share of the engines."""
    served = -(-work.num_engines(dims) // dims.world)
    groups = [*communicators(shape, dims, work), *[_pair(dims, work)] * served]
    return (
        _context_row(1, "the trainer"),
        communicator_row("trainer's communicators", groups, gpus_per_node),
        Row(
            "matrix product workspaces",
            CUBLAS_BYTES * (CUBLAS_STREAMS + GROUPED_GEMM_STREAMS),
            f"{CUBLAS_BYTES >> 20} MiB x ({CUBLAS_STREAMS} streams, {GROUPED_GEMM_STREAMS} streams "
            "of grouped products)",
            "torch CublasHandlePool.cpp (parseChosenWorkspaceSize); TransformerEngine gemm.py",
        ),
    )


def rollout_phase(
    shape: ModelShape, dims: ParallelDims, work: Workload, device_bytes: int, gpus_per_node: int
) -> Phase:
    """Return what the first rank of an engine holds, which is the same through the whole step."""
    bucket = export_buffer_bytes(shape, dims, work)
    rows = (
        *engine_rows(shape, work, device_bytes, awake=True),
        *adapter_pool_rows(shape, work),
        Row(
            "weight buckets",
            2 * bucket,
            f"2 x {bucket} B: one that comes from the trainer, one that the engine loads",
            f"{ASSUMPTION}: mrl.disaggregated.pair.PairGroup.receive has one, the engine's loader "
            "at most as much",
            managed=True,
        ),
        _context_row(2, "the engine's rank and, on its first GPU, the worker"),
        communicator_row(
            "engine's communicators",
            [*engine_communicators(work), _pair(dims, work)],
            gpus_per_node,
        ),
        Row(
            "matrix product workspaces",
            CUBLAS_BYTES * CUBLAS_STREAMS,
            f"{CUBLAS_BYTES >> 20} MiB x {CUBLAS_STREAMS} streams",
            "torch CublasHandlePool.cpp (parseChosenWorkspaceSize)",
        ),
    )
    host = present((*_rank_rows(shape, dims, work, device_bytes), *_worker_rows(shape, dims, work)))
    return Phase("rollout", 0, present((*rows, fragmentation_row(rows))), host, "rollout")


def _rank_rows(
    shape: ModelShape, dims: ParallelDims, work: Workload, device_bytes: int
) -> tuple[Row, ...]:
    """List the host rows of one rollout rank without those of the engine's worker."""
    ranks = work.num_engine_ranks(dims)
    return (
        *engine_host_rows(shape, work, ranks, device_bytes),
        Row(
            "rollout: supervisor process",
            SUPERVISOR_BYTES,
            "libraries and Python objects",
            ASSUMPTION,
        ),
    )


def _worker_rows(shape: ModelShape, dims: ParallelDims, work: Workload) -> tuple[Row, ...]:
    """List the host rows of an engine's worker."""
    each = work.sent_bytes(shape)
    tokens = _tokens_ahead(work) // work.num_engines(dims)
    return (
        Row(
            "rollout: staged weights",
            work.staged_versions * each,
            f"{work.staged_versions} version(s) x {each} B",
            "mrl.config.asynchronous.AsyncConfig.staged_versions; mrl/disaggregated/staging.py, in "
            "shared memory that every rank of the engine maps",
        ),
        _samples_row("rollout: samples and routes", shape, work, tokens),
        Row("rollout: worker process", PROCESS_BYTES, "libraries and Python objects", ASSUMPTION),
    )


def _first_rows(shape: ModelShape, work: Workload) -> tuple[Row, ...]:
    """List the host rows that the first trainer rank has beside those of all: the samples of all
    engines come to it."""
    return (_samples_row("server: samples of all engines", shape, work, _tokens_ahead(work)),)


def _tokens_ahead(work: Workload) -> int:
    """Tokens of the step that is trained and of those that are generated ahead."""
    return (1 + work.max_staleness) * work.num_tokens


def _samples_row(name: str, shape: ModelShape, work: Workload, tokens: int) -> Row:
    each = sum(routes_per_token(shape, work)) + HELD_TOKEN_BYTES
    return Row(
        name,
        tokens * each,
        f"{each} B x {tokens} tokens of {1 + work.max_staleness} step(s)",
        f"{ASSUMPTION}: {HELD_TOKEN_BYTES} B a token beside the packed routes",
    )


def nodes(
    shape: ModelShape, dims: ParallelDims, work: Workload, device_bytes: int, gpus_per_node: int
) -> list[Node]:
    """List every kind of node once, each with the trainer stage that needs most; colocated: one."""
    held = stages(shape, dims)
    if not work.rollout_ranks:
        each = [
            present(node_rows(shape, stage, dims, work, device_bytes, gpus_per_node))
            for stage in held
        ]
        return [Node(0, 0, max(each, key=total))]
    found: dict[tuple[int, int], Node] = {}
    for start in range(0, dims.world + work.rollout_ranks, gpus_per_node):
        end = min(start + gpus_per_node, dims.world + work.rollout_ranks)
        num_trainers = max(0, min(end, dims.world) - start)
        num_rollout = end - start - num_trainers
        if (num_trainers, num_rollout) in found:
            continue  # the first of a kind has the first rank, which holds more
        one = max((trainer_host_rows(shape, stage, dims, work) for stage in held), key=total)
        rows = (
            *times(one, num_trainers),
            *(_first_rows(shape, work) if not start else ()),
            *times(_rank_rows(shape, dims, work, device_bytes), num_rollout),
            *times(_worker_rows(shape, dims, work), -(-num_rollout // work.engine_tp)),
        )
        found[num_trainers, num_rollout] = Node(num_trainers, num_rollout, present(rows))
    return list(found.values())


def split_engine(dims: ParallelDims, work: Workload, gpus_per_node: int) -> str:
    """Return which engine of a disaggregated run does not lie on one node; empty where all do."""
    for first in range(dims.world, dims.world + work.rollout_ranks, work.engine_tp):
        last = first + work.engine_tp - 1
        if first // gpus_per_node != last // gpus_per_node:
            return (
                f"the engine of ranks {first} to {last} would lie on two nodes of {gpus_per_node} "
                "GPUs, and one of a disaggregated run must be on one; change "
                "rollout.tensor_parallel_size, rollout.num_ranks or --gpus"
            )
    return ""


def _pair(dims: ParallelDims, work: Workload) -> Communicator:
    """Return the group of a trainer rank and a worker (`mrl.disaggregated.pair`)."""
    return Communicator("weights to an engine", 2, dims.world + work.rollout_ranks, "peers")


def _context_row(num: int, whose: str) -> Row:
    return Row(
        "CUDA contexts",
        num * CONTEXT_BYTES,
        f"{num} x {CONTEXT_BYTES >> 20} MiB: {whose}",
        f"{ASSUMPTION}: 426 MiB of an empty context (unsloth-zoo pull 1053) and loaded kernels",
    )


def worst_phase(found: Sequence[Phase]) -> Phase:
    """Return the phase and stage that needs most of its GPU."""
    return max(found, key=lambda phase: phase.device_bytes)
