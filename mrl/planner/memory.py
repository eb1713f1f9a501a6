"""Memory of one trainer rank: permanent state, passes over micro-batches, buffers of a weight sync.

Every total is a sum of rows, each with a formula and a source. Dimensions are as in
`mrl.planner.activations`: N packed tokens, n rows of one rank, b bytes of a weight.
"""

from __future__ import annotations

import math

from mrl.planner.activations import (
    activation_rows,
    adapter_rows,
    head_rows,
    layer_parts,
    mtp_rows,
)
from mrl.planner.host import rotary_tables, routes_per_token, stage_tensors
from mrl.planner.prefixes import prefix_row
from mrl.planner.rows import ASSUMPTION, Row
from mrl.planner.shape import ModelShape
from mrl.planner.stages import (
    Stage,
    expert_data_parallel,
    indexer_norm_bytes,
    is_expert,
    mtp_layers,
    router_bias_bytes,
)
from mrl.planner.state import optimizer_row
from mrl.planner.workload import Workload, quantized_bytes
from parallel.dims import ParallelDims

UNEVEN = 0.5
"""Surplus of expert rows that the busiest rank may get, relative to balanced routing: 0.5 means 50%
more rows than with balanced routing."""
COUNTED = "counted in tests/planner/test_bytes.py"
PROOF_BYTES = 24
"""Bytes per element of a matrix while it is quantised for engines, and its rounding errors are
compared with their bounds (`mrl.weight_sync.quantize`). 21 were measured."""


def weight_bytes(shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Return the bytes of one rank's parameters and of its layers' module buffers.

    The buffers are the rotary tables of latent attention and, if biases balance the routers, the fp32
    bias and token count of every expert. The norms of indexers are fp32, too.
    """
    layers = (*stage.layers, *(mtp_layers(shape) if stage.mtp else ()))
    biases = 2 * router_bias_bytes(shape, layers)
    count, numel = rotary_tables(shape, stage, dims)
    norms = indexer_norm_bytes(shape, len(stage.layers), work.weight_bytes)
    return work.weight_bytes * (stage.num_local + count * numel) + biases + norms


def gradient_bytes(stage: Stage, work: Workload) -> int:
    """Return the bytes of Megatron's gradient buffers, without padding.

    The buffers have an element for every trained parameter of the rank, in fp32, or in the weights'
    dtype with `grad_reduce_in_fp32: false`. DDP's buckets are views of the buffers. The distributed
    optimizer's padding is not counted here; see `padding_bound`.
    """
    return work.state.gradient_bytes * stage.num_trained


def padding_bound(
    num_parameters: int, num_buckets: int, copies: int, element_bytes: int = 4
) -> int:
    """Return an upper bound, in bytes, of the padding that the distributed optimizer adds on a
    rank.

    The optimizer pads every parameter to a multiple of 64 elements, and every bucket to a multiple
    of lcm(`copies`, 128) elements. `copies`: a multiple of the number of ranks that share a bucket.
    `element_bytes`: the bytes of an element, in all padded buffers together.
    """
    return element_bytes * (63 * num_parameters + num_buckets * math.lcm(copies, 128))


def optimizer_bytes(stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Return the bytes of optimizer state on the device: moments or momentum, and main parameters."""
    shard = work.optimizer_shard(stage, dims)
    return optimizer_row(shard, work.state, work.weight_bytes).num_bytes


def routes_bytes(shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Return the bytes of the replayed expert ids on the device, summed over micro-batches.

    With r3, the ids come from the engine. The device holds the ids of one optimizer step at a time:
    per token, K ids of one or two bytes for each MoE layer of the whole model, and one byte that
    says whether the token has a route.

    With r2, the log-prob pass before the update records the ids. The device holds the ids of all
    optimizer steps of the rollout: K ids of 8 bytes for each row and each MoE layer of this rank.
    """
    if work.routing_replay == "off" or not shape.moe_layers:
        return 0
    tokens = work.packed_tokens(dims) * work.num_micro_batches(dims)
    if work.routing_replay == "r2":
        num_layers = len(set(stage.layers) & set(shape.moe_layers))
        return 8 * tokens // (dims.tp * dims.cp) * num_layers * shape.topk * work.optimizer_steps
    return tokens * (sum(routes_per_token(shape, work)) + 1)


def largest_export(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """Return the bytes of the largest parameter that is exported in one piece.

    An expert's [gate; up] is gathered together with the [gate; up] of its expert-parallel peers; every
    other parameter is exported alone. If only the adapter is sent, the parameters are the adapter's
    matrices.
    """
    if shape.adapter and work.lora == "adapter":
        return work.weight_bytes * max(
            max(numel for _, numel in part.tensors) * (dims.ep if is_expert(part) else 1)
            for part in shape.adapter.parts
        )
    expert = dims.ep * 2 * shape.hidden * shape.moe_ffn
    has_dense = len(shape.moe_layers) < shape.num_layers
    dense = 2 * shape.hidden * max(shape.dense_ffn * has_dense, shape.shared_ffn)
    return work.weight_bytes * max(
        shape.vocab * shape.hidden, expert, dense, *shape.attention_sizes,
        *(shape.indexer.matrices if shape.indexer else ()),
    )  # fmt: skip


def export_buffer_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """Return the bytes of one export buffer.

    It is the size of a bucket or of everything that is sent (the model or its adapter), whichever
    is smaller, but at least the size of the largest parameter.
    """
    whole = work.sent_bytes(shape)
    return max(min(work.bucket_bytes, whole), largest_export(shape, dims, work))


def export_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """Return the bytes that an export needs on a trainer rank.

    The result is the sum of:

    - two export buffers, or one if a single buffer holds the whole model and there is one pipeline
      stage;
    - if engines hold quantised weights, as many buffers in which matrices are quantised and everything
      else is copied, and the temporary tensors of the largest matrix;
    - the pieces of the largest parameter that other ranks send to this rank;
    - memory to merge an adapter.
    """
    largest, whole = largest_export(shape, dims, work), work.sent_bytes(shape)
    buffer = export_buffer_bytes(shape, dims, work)
    num_buffers = 1 if dims.pp == 1 and whole <= buffer else 2
    peers = largest * (dims.tp * dims.ep * dims.etp > 1)
    quantized = 0
    if work.quantized:
        exact = min(buffer, work.exact_bytes(shape))
        packed = exact + quantized_bytes((buffer - exact) // work.weight_bytes)
        quantized = num_buffers * packed + PROOF_BYTES * largest_matrix(shape)
    return num_buffers * buffer + quantized + peers + merging_bytes(shape, dims, work)


def largest_matrix(shape: ModelShape) -> int:
    """Return the number of elements of the largest matrix that engines quantise, in Hugging Face's
    format, in which the matrices of a gated MLP are apart."""
    has_dense = len(shape.moe_layers) < shape.num_layers
    widths = (shape.moe_ffn, shape.dense_ffn * has_dense, shape.shared_ffn)
    return max(*(shape.hidden * width for width in widths), *shape.attention_sizes)


def merging_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """Return the bytes needed to merge an adapter into one weight; 0 if no adapter is merged.

    Four fp32 tensors as large as this rank's shard of the weight exist at the same time: the shard,
    the adapter's updates (`scale B A`) of the Hugging Face weights that the shard consists of,
    these updates joined into one tensor, and the sum of shard and update.
    """
    if work.lora != "merged":
        return 0
    has_dense = len(shape.moe_layers) < shape.num_layers
    mlp = 2 * shape.hidden * max(shape.dense_ffn * has_dense, shape.shared_ffn)
    dense = max(mlp, *shape.attention_sizes) // dims.tp
    return 4 * 4 * max(dense, 2 * shape.hidden * shape.moe_ffn // dims.etp)


def trainer_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload
) -> tuple[Row, ...]:
    """Return the memory-plan rows of everything that a trainer keeps on the device while it works."""
    shard = work.optimizer_shard(stage, dims)
    each, size = work.state.gradient_bytes, work.weight_bytes
    dense, experts = stage_tensors(stage.trained, dims)
    frozen = f", {stage.frozen} of them frozen" if stage.frozen else ""
    padding = 0
    if work.divides_ranges:
        parameters = sum(count for count, _ in (*dense, *experts))
        copies = dims.dp * dims.cp * expert_data_parallel(dims)
        padding = padding_bound(parameters, 2 * dims.vpp, copies, size + each)
    return (
        Row("weights", weight_bytes(shape, stage, dims, work),
            f"{size} B x {stage.num_local} and buffers{frozen}",
            f"mrl.planner.memory.weight_bytes; {COUNTED}", managed=True),
        Row("gradients", gradient_bytes(stage, work), f"{each} B x {stage.num_trained}",
            f"mrl.planner.memory.gradient_bytes; {COUNTED}", managed=True),
        optimizer_row(shard, work.state, size),
        Row("padding", padding, "at most 63 elements a parameter and lcm(copies, 128) a bucket, for "
            "weights and gradients", "mrl.planner.memory.padding_bound; the bound is tested",
            managed=True),
    )  # fmt: skip


def pass_rows(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, training: bool
) -> tuple[Row, ...]:
    """Return the memory-plan rows of a pass over micro-batches, in addition to `trainer_rows`."""
    rows = work.packed_tokens(dims) // (dims.tp * dims.cp)
    layers = [n for n in stage.layers if n in shape.moe_layers]
    routed = "all optimizer steps" if work.routing_replay == "r2" else "one optimizer step"
    found = [
        *activation_rows(shape, stage, dims, work, training),
        *head_rows(shape, stage, dims, work, training),
        *adapter_rows(shape, stage, dims, work, training),
        *mtp_rows(shape, stage, dims, work, training),
        Row("routes", routes_bytes(shape, stage, dims, work), f"expert ids of {routed}",
            f"mrl.planner.memory.routes_bytes; {COUNTED}", managed=True),
        prefix_row(shape, stage, dims, work, training),
    ]  # fmt: skip
    if layers:
        parts = layer_parts(shape, layers[0])
        half, full = (sum(v) for v in zip(parts["moe"], parts["moe_act"], strict=True))
        one = rows * (work.weight_bytes * half + 4 * full)
        found.append(
            Row("uneven routing", int(UNEVEN * one), f"{UNEVEN:g} x {one} B of one layer's experts",
                f"{ASSUMPTION}: what the busiest rank gets above an even share", managed=True)
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
            f"{ASSUMPTION}: an upper bound, because autograd frees them one by one", managed=True),
        Row("attention's backward", rows * (4 * width + expanded),
            f"{rows} rows x ({width} queries in fp32, keys and values for every head)",
            "flash-attention csrc/flash_attn/flash_api.cpp (dq_accum, dk_expanded, dv_expanded)",
            managed=True),
    ]  # fmt: skip
    return tuple(found)


def export_row(shape: ModelShape, dims: ParallelDims, work: Workload) -> Row:
    """Return the row of the buffers that a weight sync needs on a trainer rank."""
    return Row(
        "sync buffers",
        export_bytes(shape, dims, work),
        f"2 buffers of rollout.weight_bucket_mb {work.bucket_bytes >> 20} or the largest parameter, "
        "and the peers' pieces of one" + ", which is merged in fp32" * (work.lora == "merged"),
        f"mrl.planner.memory.export_bytes; {COUNTED}",
        managed=True,
    )
