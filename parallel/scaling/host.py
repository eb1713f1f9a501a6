"""Host memory: pinned buffers as torch rounds them, what an asynchronous save copies, processes.

torch's allocator of pinned memory rounds every buffer up to a power of two (`CachingHostAllocator.h`,
`allocate`) unless it is larger than `pinned_max_round_threshold_mb` of PYTORCH_ALLOC_CONF, which is
without a limit by default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from parallel.dims import ParallelDims
from parallel.scaling.engine import engine_host_rows
from parallel.scaling.rows import ASSUMPTION, Row, times
from parallel.scaling.shape import ModelShape, Part, Tensors
from parallel.scaling.stages import Stage, is_expert, local_tensors
from parallel.scaling.state import ADAM_MOMENTS, copies_of, host_bytes_each, optimizer_shard
from parallel.scaling.workload import Workload

PROCESS_BYTES = 4 << 30
"""Libraries and Python objects of one trainer process."""
PINNED_SOURCE = "torch ATen/core/CachingHostAllocator.h (PowerOf2Ceil); parallel.ledger"


def pinned_bytes(num_bytes: int, exact: int | None) -> int:
    """What torch reserves for one pinned buffer; buffers above `exact` bytes are not rounded."""
    if not num_bytes or (exact is not None and num_bytes > exact):
        return num_bytes
    return 1 << (num_bytes - 1).bit_length()


def pinned_total(tensors: Tensors, element_bytes: int, exact: int | None) -> int:
    """Add up pinned bytes with one buffer a tensor."""
    return sum(count * pinned_bytes(element_bytes * n, exact) for count, n in tensors)


def stage_tensors(parts: Iterable[Part], dims: ParallelDims) -> tuple[Tensors, Tensors]:
    """Count the parameters among `parts` of a stage that one rank of it holds: (dense, experts)."""
    dense: list[tuple[int, int]] = []
    experts: list[tuple[int, int]] = []
    for part in parts:
        (experts if is_expert(part) else dense).extend(local_tensors(part, dims))
    return tuple(dense), tuple(experts)


def buffer_tensors(shape: ModelShape, stage: Stage) -> list[tuple[Tensors, int]]:
    """What is held beside the parameters, with bytes of an element; 0: those of a weight."""
    moe_layers = len(set(stage.layers) & set(shape.moe_layers))
    found: list[tuple[Tensors, int]] = [
        (((2 * moe_layers * shape.expert_bias, shape.num_experts),), 4)
    ]
    if shape.mla and shape.mla.rotary_positions:
        table = shape.mla.rotary_positions * shape.mla.rope_dim
        found.append((((2 * len(stage.layers), table),), 0))
    return found


def pinned_weights(shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Compute the size of the ledger's buffers for the weights: one a storage.

    The distributed optimizer keeps all dense and all expert weights of a chunk that are trained in one
    storage each.
    """
    each, exact = work.weight_bytes, work.exact_pinned
    dense, experts = stage_tensors(stage.trained, dims)
    if work.distributed_optimizer:
        dense, experts = (
            ((dims.vpp, stage.dense // dims.vpp),),
            ((dims.vpp, stage.expert // dims.vpp),),
        )
    found = pinned_total(dense, each, exact) + pinned_total(experts, each, exact)
    for frozen in stage_tensors(stage.parts, dims) if stage.frozen else ():
        found += pinned_total(frozen, each, exact)
    return found + sum(
        pinned_total(tensors, size or each, exact) for tensors, size in buffer_tensors(shape, stage)
    )


def pinned_state(
    stage: Stage, dims: ParallelDims, work: Workload, element_bytes: int, share: float = 1.0
) -> int:
    """Compute the size of one buffer for each piece whose optimizer state a rank keeps, of that
    share of the elements.

    Under the distributed optimizer a rank has as many times fewer pieces as there are copies. The one
    or two that its ends cut are taken as whole.
    """
    copies = copies_of(dims, work.distributed_optimizer)
    found = 0.0
    for tensors, ways in zip(stage_tensors(stage.trained, dims), copies, strict=True):
        found += share * pinned_total(tensors, element_bytes, work.exact_pinned) / ways
    return math.ceil(found)


def pinned_optimizer(stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """The ledger's buffers for the part of the optimizer that is on the device."""
    options = work.state
    kept = 1 - options.offload_fraction
    sizes = [options.exp_avg_bytes, options.exp_avg_sq_bytes] if options.precision_aware else [4, 4]
    found = sum(pinned_state(stage, dims, work, size, kept) for size in sizes)
    if work.weight_bytes == 4:
        return found
    if options.precision_aware:
        return found + pinned_state(stage, dims, work, options.main_bytes, kept)
    return found + pinned_state(stage, dims, work, 4)


def offloaded_bytes(stage: Stage, dims: ParallelDims, work: Workload) -> tuple[int, int]:
    """(pinned, not pinned) state that lives on the host for good: `optimizer_cpu_offload`."""
    share = work.state.offload_fraction
    pinned, plain = host_bytes_each(work.state)
    num = optimizer_shard(stage, dims, work.distributed_optimizer).num
    buffers = pinned // 4 * pinned_state(stage, dims, work, 4, share) if share else 0
    return buffers, int(share * plain * num)


def saved_bytes(stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """What the rank that writes most copies for an asynchronous save: weights, main parameters and
    moments of everything that is trained and that it is the main replica of."""
    options = work.state
    aware = options.precision_aware and not options.offload_fraction
    moments = options.exp_avg_bytes + options.exp_avg_sq_bytes if aware else 4 * ADAM_MOMENTS
    main = 0 if work.weight_bytes == 4 else 4
    shard = optimizer_shard(stage, dims, work.distributed_optimizer).num
    return work.weight_bytes * stage.num_trained + (main + moments) * shard


def trainer_host_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload
) -> tuple[Row, ...]:
    """List the rows of one rank. Pinned buffers stay allocated while their contents are on the
    device; without engines on its device, the trainer never leaves it and has none."""
    shares = not work.rollout_ranks
    weights = pinned_weights(shape, stage, dims, work) if shares else 0
    optimizer = pinned_optimizer(stage, dims, work) if shares else 0
    pinned, plain = offloaded_bytes(stage, dims, work)
    saved = saved_bytes(stage, dims, work) if work.async_save else 0
    copy = pinned_bytes(work.weight_bytes * stage.num_local, work.exact_pinned)
    has_copy = work.reference and shape.adapter is None  # the base is an adapter's reference
    per_token = sum(routes_per_token(shape, work)) + 32
    tokens = work.num_tokens // dims.dp
    return (
        Row("weights, pinned", weights, "one buffer a storage, each to a power of two",
            PINNED_SOURCE),
        Row("optimizer, pinned", optimizer, "one buffer a main parameter and a moment, each to a "
            "power of two", PINNED_SOURCE),
        Row("offloaded optimizer, pinned", pinned, "gradients (and main parameters), each to a power "
            "of two", "megatron-core hybrid_optimizer.py (pin_cpu_grads, pin_cpu_params)"),
        Row("offloaded optimizer", plain, f"{host_bytes_each(work.state)[1]} B an offloaded element",
            "megatron-core hybrid_optimizer.py"),
        Row("reference, pinned", 2 * copy * has_copy, "its weights, and room for the policy's",
            "parallel.reference.HostCopy; rounded as all pinned memory"),
        Row("asynchronous save", saved, "weights and optimizer state, copied and not pinned",
            "parallel.checkpoint.shard_writer.ShardWriter.request"),
        Row("samples and routes", tokens * per_token, f"{per_token} B x {tokens} tokens of a replica",
            f"{ASSUMPTION}: 32 B a token beside the packed routes"),
        Row("trainer: process", PROCESS_BYTES, "libraries and Python objects", ASSUMPTION),
    )  # fmt: skip


def routes_per_token(shape: ModelShape, work: Workload) -> list[int]:
    """Count the bytes of one token's packed routes, by MoE layer: ceil(K log2(E) / 8)."""
    if work.routing_replay != "r3" or not shape.moe_layers:
        return []
    bits = max(1, (shape.num_experts - 1 + (shape.topk == 1)).bit_length())
    return [-(-shape.topk * bits // 8)] * len(shape.moe_layers)


def node_rows(
    shape: ModelShape,
    stage: Stage,
    dims: ParallelDims,
    work: Workload,
    device_bytes: int,
    gpus_per_node: int,
) -> tuple[Row, ...]:
    """List the rows of one node full of this stage's ranks, and their engines' ranks."""
    rows = (
        *trainer_host_rows(shape, stage, dims, work),
        *engine_host_rows(shape, work, dims.world, device_bytes),
    )
    return times(rows, min(dims.world, gpus_per_node))
