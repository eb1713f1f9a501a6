"""Host memory of trainers: pinned buffers, copies for an asynchronous save, processes.

torch's allocator of pinned memory rounds every buffer up to a power of two (`CachingHostAllocator.h`,
`allocate`). Buffers larger than `pinned_max_round_threshold_mb` in PYTORCH_ALLOC_CONF are not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from moe.route_rows import route_bytes
from mrl.planner.parts import Part, Tensors
from mrl.planner.rows import ASSUMPTION, Row
from mrl.planner.shape import ModelShape
from mrl.planner.stages import Stage, is_expert, local_tensors
from mrl.planner.state import ADAM_MOMENTS, host_bytes_each, kept_tensors, shards_of
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims
from parallel.owners import num_states

PROCESS_BYTES = 4 << 30
"""Assumed bytes of libraries and Python objects in one trainer process."""
PINNED_SOURCE = "torch ATen/core/CachingHostAllocator.h (PowerOf2Ceil); parallel.ledger"


def pinned_bytes(num_bytes: int, exact: int | None) -> int:
    """Return the bytes that torch reserves for one pinned buffer of `num_bytes`.

    Buffers of more than `exact` bytes are not rounded up. If `exact` is None, all are rounded up.
    """
    if not num_bytes or (exact is not None and num_bytes > exact):
        return num_bytes
    return 1 << (num_bytes - 1).bit_length()


def pinned_total(tensors: Tensors, element_bytes: int, exact: int | None) -> int:
    """Return the bytes that torch reserves for pinned copies of `tensors`, one buffer per tensor.

    `element_bytes` is the size of an element. `exact` is described in `pinned_bytes`.
    """
    return sum(count * pinned_bytes(element_bytes * n, exact) for count, n in tensors)


def stage_tensors(parts: Iterable[Part], dims: ParallelDims) -> tuple[Tensors, Tensors]:
    """Return (dense tensors, expert tensors) that one rank holds of the `parts` of its stage."""
    dense: list[tuple[int, int]] = []
    experts: list[tuple[int, int]] = []
    for part in parts:
        (experts if is_expert(part) else dense).extend(local_tensors(part, dims))
    return tuple(dense), tuple(experts)


def buffer_tensors(
    shape: ModelShape, stage: Stage, dims: ParallelDims
) -> list[tuple[Tensors, int]]:
    """Return (tensors, bytes of an element) for each kind of module buffer on a stage.

    0 bytes mean that the elements are as large as those of the weights (`Workload.weight_bytes`).
    """
    moe_layers = len(set(stage.layers) & set(shape.moe_layers)) + shape.num_mtp * bool(stage.mtp)
    found: list[tuple[Tensors, int]] = [
        (((2 * moe_layers * shape.expert_bias, shape.num_experts),), 4)
    ]
    found.append(((rotary_tables(shape, stage, dims),), 0))
    if shape.indexer:
        num_layers = len(stage.layers)
        found.append((tuple((num_layers, numel) for numel in shape.indexer.matrices), 0))
        found.append((tuple((num_layers, numel) for numel in shape.indexer.norm), 4))
    return found


def rotary_tables(shape: ModelShape, stage: Stage, dims: ParallelDims) -> tuple[int, int]:
    """Return (number of tables, elements of each) of the cosines and sines that YaRN keeps on a stage:
    two for each layer with latent attention, otherwise two for the stage (two for each of its
    chunks under virtual pipeline parallelism, of which only the first are counted). Under context
    parallelism, Megatron fills them with the positions of one rank's share of a sequence."""
    if shape.mla:
        layers = len(stage.layers) + shape.num_mtp * bool(stage.mtp)
        return 2 * layers, shape.mla.rotary_positions // dims.cp * shape.mla.rope_dim
    return 2, shape.yarn_positions // dims.cp * shape.head_dim


def pinned_weights(shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Return the bytes of the pinned buffers to which `parallel.ledger` offloads the weights.

    There is one buffer per tensor storage. With the distributed optimizer, the trained dense
    weights of a chunk of layers are in one storage, and the chunk's trained expert weights in
    another.
    """
    each, exact = work.weight_bytes, work.exact_pinned
    dense, experts = stage_tensors(stage.trained, dims)
    if work.divides_ranges:
        dense, experts = (
            ((dims.vpp, stage.dense // dims.vpp),),
            ((dims.vpp, stage.expert // dims.vpp),),
        )
    found = pinned_total(dense, each, exact) + pinned_total(experts, each, exact)
    base = [part for part in stage.parts if not part.is_frozen] if stage.adapter else []
    for frozen in stage_tensors(base, dims):
        found += pinned_total(frozen, each, exact)
    return found + sum(
        pinned_total(tensors, size or each, exact)
        for tensors, size in buffer_tensors(shape, stage, dims)
    )


def pinned_state(
    stage: Stage, dims: ParallelDims, work: Workload, element_bytes: int, share: float = 1.0
) -> int:
    """Return the pinned bytes that a rank needs for one kind of optimizer state, such as a moment.

    `share` is the share of the state that is counted. There is one buffer per parameter, of
    `element_bytes` per element. Under the distributed optimizer, the total is divided by the number
    of ranks over which the state is sharded, as if no parameter were split between two ranks.
    """
    shards = shards_of(dims, work.distributed_optimizer)
    found = 0.0
    for tensors, ways in zip(stage_tensors(stage.trained, dims), shards, strict=True):
        found += share * pinned_total(tensors, element_bytes, work.exact_pinned) / ways
    return math.ceil(found)


def pinned_optimizer(stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Return the bytes of the pinned buffers to which `parallel.ledger` offloads optimizer state.

    The state that Megatron's option `optimizer_cpu_offload` keeps on the host is not included.
    """
    options = work.state
    if options.muon:
        return sum(
            num_states(is_muons=is_muons, has_main=work.weight_bytes < 4)
            * pinned_bytes(4 * numel, work.exact_pinned)
            for tensors in kept_tensors(stage, dims, work.distributed_optimizer, work.weight_bytes)
            for numel, is_muons in tensors
        )
    kept = 1 - options.offload_fraction
    sizes = [options.exp_avg_bytes, options.exp_avg_sq_bytes] if options.precision_aware else [4, 4]
    found = sum(pinned_state(stage, dims, work, size, kept) for size in sizes)
    if work.weight_bytes == 4:
        return found
    if options.precision_aware:
        return found + pinned_state(stage, dims, work, options.main_bytes, kept)
    return found + pinned_state(stage, dims, work, 4)


def offloaded_bytes(stage: Stage, dims: ParallelDims, work: Workload) -> tuple[int, int]:
    """Return (pinned, not pinned) bytes of the state that `optimizer_cpu_offload` keeps on the host."""
    share = work.state.offload_fraction
    pinned, plain = host_bytes_each(work.state)
    num = work.optimizer_shard(stage, dims).num
    buffers = pinned // 4 * pinned_state(stage, dims, work, 4, share) if share else 0
    return buffers, int(share * plain * num)


def saved_bytes(stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Return the largest number of bytes that a rank of the stage copies for an asynchronous save.

    A rank saves its shard of the main parameters and moments. If several ranks hold the same
    weights, one of them (the main replica) saves them. The result is for a rank that saves the
    weights of all trained parameters that it holds.
    """
    options = work.state
    aware = options.precision_aware and not options.offload_fraction
    moments = options.exp_avg_bytes + options.exp_avg_sq_bytes if aware else 4 * ADAM_MOMENTS
    main = 0 if work.weight_bytes == 4 else 4
    shard = work.optimizer_shard(stage, dims)
    state = (main + moments) * shard.num - 4 * shard.muon
    return work.weight_bytes * stage.num_trained + state


def trainer_host_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload
) -> tuple[Row, ...]:
    """Return the host-memory rows of one trainer rank.

    Pinned buffers stay allocated while their contents are on the device. A disaggregated trainer keeps
    its weights and optimizer state on the device, so it has no pinned buffers for them.
    """
    is_colocated = not work.rollout_ranks
    weights = pinned_weights(shape, stage, dims, work) if is_colocated else 0
    optimizer = pinned_optimizer(stage, dims, work) if is_colocated else 0
    pinned, plain = offloaded_bytes(stage, dims, work)
    saved = saved_bytes(stage, dims, work) if work.async_save else 0
    copy = pinned_bytes(work.weight_bytes * stage.num_local, work.exact_pinned)
    has_copy = work.reference and shape.adapter is None  # an adapter's reference is its base model
    per_token = sum(routes_per_token(shape, work)) + 32
    tokens = work.num_tokens // dims.dp
    return (
        Row("weights, pinned", weights, "one buffer per storage, each rounded up to a power of two",
            PINNED_SOURCE),
        Row("optimizer, pinned", optimizer, "one buffer per main parameter and per moment, each "
            "rounded up to a power of two", PINNED_SOURCE),
        Row("offloaded optimizer, pinned", pinned, "gradients (and main parameters), each rounded up "
            "to a power of two", "megatron-core hybrid_optimizer.py (pin_cpu_grads, pin_cpu_params)"),
        Row("offloaded optimizer", plain, f"{host_bytes_each(work.state)[1]} B per offloaded element",
            "megatron-core hybrid_optimizer.py"),
        Row("reference, pinned", 2 * copy * has_copy, "its weights, and a buffer for the policy's",
            "parallel.reference.HostCopy; rounded like all pinned memory"),
        Row("asynchronous save", saved, "weights and optimizer state, copied and not pinned",
            "parallel.checkpoint.shard_writer.ShardWriter.request"),
        Row("samples and routes", tokens * per_token, f"{per_token} B x {tokens} tokens of a replica",
            f"{ASSUMPTION}: 32 B per token in addition to its routes"),
        Row("trainer: process", PROCESS_BYTES, "libraries and Python objects", ASSUMPTION),
    )  # fmt: skip


def routes_per_token(shape: ModelShape, work: Workload) -> list[int]:
    """Return a list with the bytes of a token's expert ids in each MoE layer; [] without r3 replay."""
    if work.routing_replay != "r3" or not shape.moe_layers:
        return []
    return [route_bytes(shape.num_experts, shape.topk)] * len(shape.moe_layers)
