"""Bytes on one rank: what stays, what a micro-batch adds, and who holds what in each phase of a step.

Every total is the sum of rows with a formula and a source. Dimensions as in
`parallel.scaling.activations`: N packed tokens, n rows of one rank, b bytes of a weight.
"""

from __future__ import annotations

import math

from parallel.dims import ParallelDims
from parallel.scaling.activations import activation_rows, adapter_rows, head_rows, layer_parts
from parallel.scaling.engine import engine_host_rows, engine_rows
from parallel.scaling.engine_adapter import adapter_pool_rows
from parallel.scaling.host import routes_per_token, stage_tensors, trainer_host_rows
from parallel.scaling.rows import ASSUMPTION, Phase, Row, present
from parallel.scaling.runtime import fragmentation_row, runtime_rows, sleeping_graph_row
from parallel.scaling.shape import ModelShape
from parallel.scaling.stages import (
    Stage,
    expert_data_parallel,
    is_expert,
    router_bias_bytes,
    stages,
)
from parallel.scaling.state import optimizer_row, optimizer_shard, step_rows
from parallel.scaling.workload import Workload

UNEVEN = 0.5
"""Rows of experts above an even share that the busiest rank may get."""
COUNTED = "counted in tests/parallel/scaling/test_scaling_bytes.py"


def weight_bytes(shape: ModelShape, stage: Stage, work: Workload) -> int:
    """Count b bytes per parameter, and the buffers beside them: a balanced router's fp32 bias
    and count per expert, latent attention's rotary tables."""
    biases, mla = 2 * router_bias_bytes(shape, stage.layers), shape.mla
    table = 2 * mla.rotary_positions * mla.rope_dim * len(stage.layers) if mla else 0
    return work.weight_bytes * (stage.num_local + table) + biases


def gradient_bytes(stage: Stage, work: Workload) -> int:
    """Megatron's buffers hold the sum of the gradients of every local parameter that is trained: in
    fp32, or as the weights are with `grad_reduce_in_fp32: false`.

    The distributed optimizer pads them: every parameter to 64 elements and every bucket to a multiple
    of lcm(copies, 128), which `padding_bound` bounds. DDP's buckets are views of them.
    """
    return work.state.gradient_bytes * stage.num_trained


def padding_bound(
    num_parameters: int, num_buckets: int, copies: int, element_bytes: int = 4
) -> int:
    """Most bytes that the distributed optimizer's padding adds to one kind of buffer of one rank."""
    return element_bytes * (63 * num_parameters + num_buckets * math.lcm(copies, 128))


def optimizer_bytes(stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Adam's two moments, and main parameters beside bf16 weights, that stay on the device."""
    shard = optimizer_shard(stage, dims, work.distributed_optimizer)
    return optimizer_row(shard, work.state, work.weight_bytes).num_bytes


def routes_bytes(shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Count the expert ids on the device in one step, all of its micro-batches together.

    r3, those that the engine captured: ceil(K log2(E) / 8) bytes per token and MoE layer of the whole
    model. r2, those that the pass before the update recorded: 8 bytes an id, for this rank's rows and
    layers, of every optimizer step.
    """
    if work.routing_replay == "off" or not shape.moe_layers:
        return 0
    tokens = work.packed_tokens(dims) * work.num_micro_batches(dims)
    if work.routing_replay == "r2":
        own = len(set(stage.layers) & set(shape.moe_layers))
        return 8 * tokens // (dims.tp * dims.cp) * own * shape.topk * work.optimizer_steps
    return tokens * sum(routes_per_token(shape, work))


def largest_export(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """The largest parameter that is exported in one piece: an expert's [gate; up] goes with those of
    its expert-parallel peers, everything else alone."""
    if shape.adapter and work.lora == "adapter":
        return work.weight_bytes * max(
            max(numel for _, numel in part.tensors) * (dims.ep if is_expert(part) else 1)
            for part in shape.adapter.parts
        )
    expert = dims.ep * 2 * shape.hidden * shape.moe_ffn
    has_dense = len(shape.moe_layers) < shape.num_layers
    dense = 2 * shape.hidden * max(shape.dense_ffn * has_dense, shape.shared_ffn)
    return work.weight_bytes * max(
        shape.vocab * shape.hidden, expert, dense, *shape.attention_sizes
    )


def export_buffer_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """Count the bytes of one buffer: a bucket, all weights, or the largest parameter."""
    whole = work.sent_bytes(shape)
    return max(min(work.bucket_bytes, whole), largest_export(shape, dims, work))


def export_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """What the export adds: two buffers of the recipe's size, or as large as the largest parameter that
    does not fit into it, and the peers' pieces of that one parameter; merging an adapter adds more."""
    largest, whole = largest_export(shape, dims, work), work.sent_bytes(shape)
    buffer = export_buffer_bytes(shape, dims, work)
    num_buffers = 1 if dims.pp == 1 and whole <= buffer else 2
    peers = largest * (dims.tp * dims.ep * dims.etp > 1)
    return num_buffers * buffer + peers + merging_bytes(shape, dims, work)


def merging_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """Count what merging one weight takes: its shard, the parts of the update, the update and the sum,
    all in fp32."""
    if work.lora != "merged":
        return 0
    has_dense = len(shape.moe_layers) < shape.num_layers
    mlp = 2 * shape.hidden * max(shape.dense_ffn * has_dense, shape.shared_ffn)
    dense = max(mlp, *shape.attention_sizes) // dims.tp
    return 4 * 4 * max(dense, 2 * shape.hidden * shape.moe_ffn // dims.etp)


def trainer_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload
) -> tuple[Row, ...]:
    """What is on the device whenever the trainer works."""
    shard = optimizer_shard(stage, dims, work.distributed_optimizer)
    each, size = work.state.gradient_bytes, work.weight_bytes
    dense, experts = stage_tensors(stage.trained, dims)
    frozen = f", {stage.frozen} of them frozen" if stage.frozen else ""
    padding = 0
    if work.distributed_optimizer:
        parameters = sum(count for count, _ in (*dense, *experts))
        copies = dims.dp * dims.cp * expert_data_parallel(dims)
        padding = padding_bound(parameters, 2 * dims.vpp, copies, size + each)
    return (
        Row("weights", weight_bytes(shape, stage, work),
            f"{size} B x {stage.num_local} and buffers{frozen}",
            f"parallel.scaling.memory.weight_bytes; {COUNTED}", managed=True),
        Row("gradients", gradient_bytes(stage, work), f"{each} B x {stage.num_trained}",
            f"parallel.scaling.memory.gradient_bytes; {COUNTED}", managed=True),
        optimizer_row(shard, work.state, size),
        Row("padding", padding, "at most 63 elements a parameter and lcm(copies, 128) a bucket, of "
            "weights and gradients", "parallel.scaling.memory.padding_bound; the bound is tested",
            managed=True),
    )  # fmt: skip


def pass_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, training: bool
) -> tuple[Row, ...]:
    """What the micro-batches of a pass add to them."""
    rows = work.packed_tokens(dims) // (dims.tp * dims.cp)
    layers = [n for n in stage.layers if n in shape.moe_layers]
    found = [
        *activation_rows(shape, stage, dims, work, training),
        *head_rows(shape, stage, dims, work, training),
        *adapter_rows(shape, stage, dims, work, training),
        Row("routes", routes_bytes(shape, stage, dims, work), "packed expert ids of one optimizer step",
            f"parallel.scaling.memory.routes_bytes; {COUNTED}", managed=True),
    ]  # fmt: skip
    if layers:
        half, full = (sum(v) for v in zip(*_expert_parts(shape, layers[0]), strict=True))
        one = rows * (work.weight_bytes * half + 4 * full)
        found.append(
            Row("uneven routing", int(UNEVEN * one), f"{UNEVEN:g} x {one} B of one layer's experts",
                f"{ASSUMPTION}: the busiest rank's rows above an even share", managed=True)
        )  # fmt: skip
    if not training:
        return tuple(found)
    largest = max(
        rows * sum(work.weight_bytes * h + 4 * f for h, f in layer_parts(shape, n).values())
        for n in stage.layers
    )
    width = shape.query_width
    expanded = 2 * width * work.weight_bytes * (shape.mla is None and shape.kv_heads < shape.heads)
    found += [
        Row("gradients of one layer's activations", largest, "as large as one layer's activations",
            f"{ASSUMPTION}: an upper bound, as autograd frees them one by one", managed=True),
        Row("attention's backward", rows * (4 * width + expanded),
            f"{rows} rows x ({width} queries in fp32, keys and values for every head)",
            "flash-attention csrc/flash_attn/flash_api.cpp (dq_accum, dk_expanded, dv_expanded)",
            managed=True),
    ]  # fmt: skip
    return tuple(found)


def _expert_parts(shape: ModelShape, number: int) -> list[tuple[int, int]]:
    parts = layer_parts(shape, number)
    return [parts["moe"], parts["moe_act"]]


def export_row(shape: ModelShape, dims: ParallelDims, work: Workload) -> Row:
    """Return what a weight sync adds on a trainer rank."""
    return Row(
        "sync buffers",
        export_bytes(shape, dims, work),
        f"2 buffers of rollout.weight_bucket_mb {work.bucket_bytes >> 20} or the largest parameter, "
        "and the peers' pieces of one" + ", which is merged in fp32" * (work.lora == "merged"),
        f"parallel.scaling.memory.export_bytes; {COUNTED}",
        managed=True,
    )


def phases(
    shape: ModelShape,
    dims: ParallelDims,
    work: Workload,
    device_bytes: int,
    gpus_per_node: int = 8,
) -> list[Phase]:
    """List every phase of a step on every pipeline stage, in the order of the trainer's step, where
    trainer and engines share devices (`parallel.scaling.roles.all_phases` knows both placements)."""
    assert not work.rollout_ranks, "see parallel.scaling.roles"
    return [
        phase
        for stage in stages(shape, dims)
        for phase in _stage_phases(shape, stage, dims, work, device_bytes, gpus_per_node)
    ]


def _stage_phases(
    shape: ModelShape,
    stage: Stage,
    dims: ParallelDims,
    work: Workload,
    device_bytes: int,
    gpus_per_node: int,
) -> list[Phase]:
    own = trainer_rows(shape, stage, dims, work)
    runtime = (*runtime_rows(shape, dims, work, gpus_per_node), *adapter_pool_rows(shape, work))
    asleep = (*runtime, sleeping_graph_row(shape, work, stays=False))
    shard = optimizer_shard(stage, dims, work.distributed_optimizer)
    buffers = export_row(shape, dims, work)
    loading = engine_rows(shape, work, device_bytes, awake=False)
    contents = {
        "sync": (own[0], *loading, buffers, *asleep),
        "rollout": (*engine_rows(shape, work, device_bytes, awake=True), *runtime),
        "log-probs": (*own, *pass_rows(shape, stage, dims, work, training=False), *asleep),
        "train": (*own, *pass_rows(shape, stage, dims, work, training=True), *asleep),
        "update": (*own, *step_rows(shard, work.state, work.weight_bytes), *asleep),
    }
    host = present(
        (
            *trainer_host_rows(shape, stage, dims, work),
            *engine_host_rows(shape, work, dims.world, device_bytes),
        )
    )
    return [
        Phase(name, stage.index, present((*rows, fragmentation_row(rows))), host)
        for name, rows in contents.items()
    ]
