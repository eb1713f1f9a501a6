"""GPU memory of one rank in each phase of a step, and host memory of one node, by the ranks' roles.

In a colocated run every rank has both roles: it trains, and its device also holds a part of an
engine. The state of the trainer and that of the engine take turns on the device.

In a disaggregated run a trainer rank shares its device with no engine, so its weights and optimizer
state stay on the device through the whole step, even while it sends weights. A rollout rank shares its
device with no trainer, so its engine is always awake. The first rank of an engine also runs a worker.
The worker receives weights from a trainer rank over a communicator of the two processes, and keeps
versions of the weights in host memory (`mrl/weight_sync/staging.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrl.planner.deltas import comparison_row, last_version_row
from mrl.planner.engine import engine_host_rows, engine_rows
from mrl.planner.engine_adapter import adapter_pool_rows
from mrl.planner.hardware import Hardware
from mrl.planner.host import PROCESS_BYTES, routes_per_token, trainer_host_rows
from mrl.planner.memory import export_buffer_bytes, export_row, pass_rows, trainer_rows
from mrl.planner.muon import muon_rows
from mrl.planner.quantized import replacement_rows
from mrl.planner.rows import ASSUMPTION, Phase, Role, Row, present, times, total
from mrl.planner.runtime import (
    CONTEXT_BYTES,
    CUBLAS_STREAMS,
    communicator_row,
    context_row,
    engine_communicators,
    fragmentation_row,
    runtime_rows,
    worker_pair,
    workspace_row,
)
from mrl.planner.shape import ModelShape
from mrl.planner.stages import Stage, stages
from mrl.planner.state import step_rows
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

SUPERVISOR_BYTES = 2 << 30
"""Bytes of libraries and Python objects in the process that a launcher starts on a rollout rank."""
HELD_TOKEN_BYTES = 32
"""Bytes that a process holds per token of a sample, in addition to the token's routes."""


@dataclass(frozen=True)
class Node:
    """The ranks and the host memory of a node.

    Ranks fill the nodes in order; the last node may have free GPUs.
    """

    num_trainers: int
    """Number of ranks on the node that only train; 0 in a colocated run."""
    num_rollout: int
    """Number of ranks on the node that only generate; 0 in a colocated run."""
    rows: tuple[Row, ...]

    def describe(self) -> str:
        """Return the number of ranks of each role in words; empty in a colocated run."""
        kinds = [("trainer", self.num_trainers), ("rollout", self.num_rollout)]
        return " and ".join(f"{num} {kind} rank(s)" for kind, num in kinds if num)


def all_phases(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> list[Phase]:
    """Return the phases of a step in their order, for one pipeline stage after the other.

    In a disaggregated run, the phases of the trainer ranks come first, followed by the single phase
    of a rollout rank.
    """
    found = [
        phase
        for stage in stages(shape, dims)
        for phase in _stage_phases(shape, stage, dims, work, gpu)
    ]
    return [*found, _rollout_phase(shape, dims, work, gpu)] if work.rollout_ranks else found


def _stage_phases(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, gpu: Hardware
) -> list[Phase]:
    """Return the phases of one rank of `stage`. In a colocated run the rank also generates."""
    own, export = trainer_rows(shape, stage, dims, work), export_row(shape, dims, work)
    runtime = runtime_rows(shape, dims, work, gpu.gpus_per_node)
    shard = work.optimizer_shard(stage, dims)
    if work.rollout_ranks:
        contents = {"sync": (*own, export, comparison_row(work))}
    else:
        runtime = (*runtime, *adapter_pool_rows(shape, work))
        asleep, awake = (
            engine_rows(shape, work, gpu.memory_bytes, awake=awake) for awake in (False, True)
        )
        contents = {"sync": (own[0], *asleep, export), "rollout": awake}
    replacement = replacement_rows(shape, stage, dims, work)
    passes = pass_rows(shape, stage, dims, work, training=False)
    if replacement:  # before the engine wakes
        held = own if work.rollout_ranks else own[:1]
        contents = {"canaries": (*held, *replacement, *passes)} | contents
    measured = replacement if work.decomposes and shape.adapter is None else ()
    contents |= {
        "log-probs": (*own, *passes, *measured),
        "train": (*own, *pass_rows(shape, stage, dims, work, training=True)),
        "update": (
            *own,
            *step_rows(shard, work.state, work.weight_bytes),
            *muon_rows(stage, work),
        ),
    }
    role = "trainer" if work.rollout_ranks else "both"
    return [_phase(name, stage.index, (*rows, *runtime), role) for name, rows in contents.items()]


def _rollout_phase(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> Phase:
    """Return the memory of an engine's first rank, as a single phase that lasts for the whole step."""
    bucket = export_buffer_bytes(shape, dims, work)
    groups = [*engine_communicators(work), worker_pair(dims, work)]
    rows = (
        *engine_rows(shape, work, gpu.memory_bytes, awake=True),
        *adapter_pool_rows(shape, work),
        Row(
            "weight buckets",
            2 * bucket,
            f"2 x {bucket} B: one that is received from the trainer, one that the engine loads",
            f"{ASSUMPTION}: mrl.weight_sync.pair_group.PairGroup.receive has one, the engine's loader "
            "at most one",
            managed=True,
        ),
        context_row(
            2,
            f"2 x {CONTEXT_BYTES >> 20} MiB: the engine's rank and, on its first GPU, the worker",
        ),
        communicator_row("engine's communicators", groups, gpu.gpus_per_node),
        workspace_row(CUBLAS_STREAMS, f"{CUBLAS_STREAMS} streams", has_grouped=False),
    )
    return _phase("rollout", 0, rows, "rollout")


def _phase(name: str, stage: int, rows: tuple[Row, ...], role: Role) -> Phase:
    return Phase(name, stage, present((*rows, fragmentation_row(rows))), role)


def _rank_rows(shape: ModelShape, work: Workload, gpu: Hardware) -> tuple[Row, ...]:
    """Return the host-memory rows of one rollout rank, without the rows of the engine's worker."""
    libraries = "libraries and Python objects"
    return (
        *engine_host_rows(shape, work, work.rollout_ranks, gpu.memory_bytes),
        Row("rollout: supervisor process", SUPERVISOR_BYTES, libraries, ASSUMPTION),
    )


def _worker_rows(shape: ModelShape, dims: ParallelDims, work: Workload) -> tuple[Row, ...]:
    """Return the host-memory rows of an engine's worker."""
    each = work.encoded_bytes(shape)
    tokens = _tokens_ahead(work) // work.num_engines(dims)
    return (
        Row(
            "rollout: staged weights",
            work.staged_versions * each,
            f"{work.staged_versions} version(s) x {each} B",
            "mrl.config.asynchronous.AsyncConfig.staged_versions; mrl/weight_sync/staging.py, in "
            "shared memory that every rank of the engine maps",
        ),
        _samples_row("rollout: samples and routes", shape, work, tokens),
        Row("rollout: worker process", PROCESS_BYTES, "libraries and Python objects", ASSUMPTION),
    )


def _tokens_ahead(work: Workload) -> int:
    """Return the number of tokens in 1 + `max_staleness` steps, all of which may be in memory."""
    return (1 + work.max_staleness) * work.num_tokens


def _samples_row(name: str, shape: ModelShape, work: Workload, tokens: int) -> Row:
    each = sum(routes_per_token(shape, work)) + HELD_TOKEN_BYTES
    return Row(
        name,
        tokens * each,
        f"{each} B x {tokens} tokens of {1 + work.max_staleness} step(s)",
        f"{ASSUMPTION}: {HELD_TOKEN_BYTES} B per token in addition to its routes",
    )


def nodes(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> list[Node]:
    """Return one `Node` for each kind of node in the run.

    A colocated run has one kind of node. In a disaggregated run the kinds differ in how many trainer
    and rollout ranks they have. All trainer ranks of a node are assumed to belong to the pipeline stage
    that needs the most host memory.
    """
    one = max((trainer_host_rows(shape, s, dims, work) for s in stages(shape, dims)), key=total)
    if not work.rollout_ranks:
        rows = (*one, *engine_host_rows(shape, work, dims.world, gpu.memory_bytes))
        return [Node(0, 0, present(times(rows, min(dims.world, gpu.gpus_per_node))))]
    # The first trainer rank receives the samples of all engines.
    server = _samples_row("server: samples of all engines", shape, work, _tokens_ahead(work))
    num_senders = min(
        dims.world, work.num_engines(dims)
    )  # rank r sends to engines r, r + world, ...
    found: dict[tuple[int, int], Node] = {}
    for start in range(0, dims.world + work.rollout_ranks, gpu.gpus_per_node):
        end = min(start + gpu.gpus_per_node, dims.world + work.rollout_ranks)
        num_trainers = max(0, min(end, dims.world) - start)
        num_rollout = end - start - num_trainers
        if (num_trainers, num_rollout) in found:
            continue  # the first node of a kind may hold rank 0, which needs more
        rows = (
            *times(one, num_trainers),
            *times((last_version_row(shape, work),), max(0, min(end, num_senders) - start)),
            *(() if start else (server,)),
            *times(_rank_rows(shape, work, gpu), num_rollout),
            *times(_worker_rows(shape, dims, work), -(-num_rollout // work.engine_tp)),
        )
        found[num_trainers, num_rollout] = Node(num_trainers, num_rollout, present(rows))
    return list(found.values())


def split_engine(dims: ParallelDims, work: Workload, gpus_per_node: int) -> str:
    """Return an error message if an engine of a disaggregated run would span nodes; empty otherwise."""
    for first in range(dims.world, dims.world + work.rollout_ranks, work.engine_tp):
        last = first + work.engine_tp - 1
        if first // gpus_per_node != last // gpus_per_node:
            return (
                f"the engine of ranks {first} to {last} would be on two nodes of {gpus_per_node} "
                "GPUs, and an engine of a disaggregated run must be on one; change "
                "rollout.tensor_parallel_size, rollout.num_ranks or --gpus"
            )
    return ""


def worst_phase(found: Sequence[Phase]) -> Phase:
    """Return the phase that needs the most GPU memory, over all roles and pipeline stages."""
    return max(found, key=lambda phase: phase.device_bytes)
