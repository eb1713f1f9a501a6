"""Bytes on one rank: what stays, what a micro-batch adds, and who holds what in each phase of a step.

Dimensions: N packed tokens of a micro-batch, n = N / (tp x cp) rows of one rank, H hidden, V
vocabulary, K experts per token, F columns of an expert, b bytes of a weight or activation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from parallel.dims import ParallelDims
from parallel.scaling.shape import ModelShape
from parallel.scaling.stages import Stage, expert_data_parallel, router_bias_bytes, stages
from parallel.scaling.workload import Workload

RUNTIME_BYTES = 3 << 30
"""Assumed: CUDA contexts of trainer and engine, NCCL buffers, fragmentation. Not measured."""


@dataclass(frozen=True)
class Phase:
    """What one rank holds during one phase, in bytes by what it is."""

    name: str
    stage: int
    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def weight_bytes(shape: ModelShape, stage: Stage, work: Workload) -> int:
    """b per parameter, and the buffers beside them: a balanced router's fp32 bias and count per expert,
    latent attention's rotary tables."""
    biases, mla = 2 * router_bias_bytes(shape, stage.layers), shape.mla
    table = 2 * mla.rotary_positions * mla.rope_dim * len(stage.layers) if mla else 0
    return work.weight_bytes * (stage.num_local + table) + biases


def gradient_bytes(stage: Stage) -> int:
    """Megatron's buffers hold fp32 sums of every local parameter.

    The distributed optimizer pads them: every parameter to 64 elements and every bucket to a multiple
    of lcm(copies, 128), which `padding_bound` bounds.
    """
    return 4 * stage.num_local


def padding_bound(num_parameters: int, num_buckets: int, copies: int) -> int:
    """Most bytes that the distributed optimizer's padding adds to the buffers of one rank."""
    return 4 * (63 * num_parameters + num_buckets * math.lcm(copies, 128))


def optimizer_bytes(stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Adam's two fp32 moments, and fp32 main weights beside bf16 ones: 8 or 12 per parameter.

    The distributed optimizer shares them out over the copies of a parameter (ZeRO stage 1,
    arXiv 1910.02054): dp x cp of a dense one, expert-data parallel of an expert.
    """
    each = 8 if work.weight_bytes == 4 else 12
    if not work.distributed_optimizer:
        return each * stage.num_local
    dense = -(-stage.dense // (dims.dp * dims.cp))
    return each * (dense + -(-stage.expert // expert_data_parallel(dims)))


def layer_activation_bytes(shape: ModelShape, number: int, rows: int, work: Workload) -> int:
    """What one layer keeps of a micro-batch for its backward, without recompute.

    After Korthikanti et al. (arXiv 2205.05198, section 4), with attention that keeps no scores, no
    dropout, SwiGLU and MoE: both norms' inputs and outputs; queries, keys and values, once more after
    their norms and after RoPE; the attention's output; per expert row its input and 3 F columns; the
    router's logits and probabilities in fp32. Routing is taken as balanced.

    This is what fused GPU layers need. Megatron's local layers on a CPU keep 1.7 (fp32) to 2.1 (bf16)
    times as much: copies of unfused SwiGLU and norms.
    """
    width = shape.query_width + shape.kv_width
    turned = shape.query_width + shape.kv_width // 2
    elements = 4 * shape.hidden + width + (1 + shape.qk_norm) * turned + shape.value_width
    fp32 = shape.heads
    if number in shape.moe_layers:
        elements += shape.topk * (shape.hidden + 3 * shape.moe_ffn) + 3 * shape.shared_ffn
        fp32 += 2 * shape.num_experts
    else:
        elements += 3 * shape.dense_ffn
    return rows * (work.weight_bytes * elements + 4 * fp32)


def in_flight(stage: int, dims: ParallelDims, num_micro_batches: int) -> int:
    """Chunk activations that a pipeline rank keeps at its peak.

    1F1B (arXiv 2104.04473, section 2.2): pp - stage micro-batches. Interleaved (the same, 2.3, as
    Megatron's schedule counts): 2 (pp - stage - 1) + (vpp - 1) pp + 1 chunks.
    """
    if dims.vpp == 1:
        return min(num_micro_batches, dims.pp - stage)
    chunks = 2 * (dims.pp - stage - 1) + (dims.vpp - 1) * dims.pp + 1
    return min(num_micro_batches * dims.vpp, chunks)


def activation_bytes(shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Kept at the peak of training. With full recompute: each layer's input, and one layer whole."""
    rows = work.packed_tokens(dims) // (dims.tp * dims.cp)
    one = {n: layer_activation_bytes(shape, n, rows, work) for n in stage.layers}
    peak = in_flight(stage.index, dims, work.num_micro_batches(dims))
    if work.recompute:
        inputs = stage.chunk_layers * rows * shape.hidden * work.weight_bytes
        return peak * inputs + max(one.values())
    return peak * sum(one.values()) // dims.vpp


def logits_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """[N / cp, V / tp] once: mrl reads them as they are and its backward overwrites them."""
    return work.weight_bytes * work.packed_tokens(dims) // dims.cp * shape.vocab // dims.tp


def routes_bytes(shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload) -> int:
    """Expert ids on the device in one step, all of its micro-batches together.

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
    bits = max(1, (shape.num_experts - 1 + (shape.topk == 1)).bit_length())
    return tokens * len(shape.moe_layers) * -(-shape.topk * bits // 8)


def engine_weight_bytes(shape: ModelShape, work: Workload) -> int:
    """The whole model on each engine of `engine_tp` ranks."""
    return work.weight_bytes * shape.num_parameters // work.engine_tp


def kv_bytes_per_token(shape: ModelShape, work: Workload) -> int:
    """Of one engine rank. Latent attention's compressed keys and values stand on every rank."""
    ways = 1 if shape.mla else min(work.engine_tp, shape.kv_heads)
    return work.weight_bytes * shape.num_layers * shape.kv_cache_width // ways


def kv_capacity_tokens(shape: ModelShape, work: Workload, device_bytes: int) -> int:
    """Tokens that fit beside the engine's weights; negative where not even those fit."""
    room = int(device_bytes * work.engine_share) - engine_weight_bytes(shape, work)
    return room // kv_bytes_per_token(shape, work)


def largest_export(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """The largest parameter that is exported in one piece: an expert's [gate; up] goes with those of
    its expert-parallel peers, everything else alone."""
    expert = dims.ep * 2 * shape.hidden * shape.moe_ffn
    has_dense = len(shape.moe_layers) < shape.num_layers
    dense = 2 * shape.hidden * max(shape.dense_ffn * has_dense, shape.shared_ffn)
    return work.weight_bytes * max(
        shape.vocab * shape.hidden, expert, dense, *shape.attention_sizes
    )


def export_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> int:
    """What the export adds: two buffers of the recipe's size, or as large as the largest parameter that
    does not fit into it, and the peers' pieces of that one parameter."""
    largest, whole = largest_export(shape, dims, work), work.weight_bytes * shape.num_parameters
    buffer = max(min(work.bucket_bytes, whole), largest)
    num_buffers = 1 if dims.pp == 1 and whole <= buffer else 2
    return num_buffers * buffer + largest * (dims.tp * dims.ep * dims.etp > 1)


def phases(shape: ModelShape, dims: ParallelDims, work: Workload, device_bytes: int) -> list[Phase]:
    """Every phase of a step on every pipeline stage, in the order of `mrl.collect` and the trainer."""
    return [
        phase
        for stage in stages(shape, dims)
        for phase in _stage_phases(shape, stage, dims, work, device_bytes)
    ]


def _stage_phases(
    shape: ModelShape, stage: Stage, dims: ParallelDims, work: Workload, device_bytes: int
) -> list[Phase]:
    weights, runtime = weight_bytes(shape, stage, work), {"runtime": RUNTIME_BYTES}
    optimizer = optimizer_bytes(stage, dims, work)
    # And room for the policy's while they are away (`parallel.reference`).
    reference = {"reference": 2 * weights} if work.reference else {}
    engine = engine_weight_bytes(shape, work)
    kv = max(0, int(device_bytes * work.engine_share) - engine)
    needed = kv_bytes_per_token(shape, work) * work.sequence_len
    trainer = {"weights": weights, "gradients": gradient_bytes(stage), "optimizer": optimizer}
    rows = work.packed_tokens(dims) // (dims.tp * dims.cp)
    layer = max(layer_activation_bytes(shape, n, rows, work) for n in stage.layers)
    logits = {"logits": logits_bytes(shape, dims, work)} if stage.has_output else {}
    routes = {"routes": routes_bytes(shape, stage, dims, work)}
    buckets = export_bytes(shape, dims, work)
    forward = {**trainer, "activations": layer, **logits, **routes, **runtime}
    train = {**forward, "activations": activation_bytes(shape, stage, dims, work)}
    # Pinned once and kept (`parallel.ledger`): the host gives nothing back while they are on the GPU.
    host = {"weights": weights, "optimizer": optimizer, **reference}
    index = stage.index
    result = [
        Phase("sync", index, {"weights": weights, "engine weights": engine, "buckets": buckets,
                              **runtime}, host),
        Phase("rollout", index, {"engine weights": engine, "KV cache": max(kv, needed), **runtime},
              host),
        Phase("log-probs", index, forward, host),
        Phase("train", index, train, host),
    ]  # fmt: skip
    return result
