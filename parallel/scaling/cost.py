"""The seconds of one step are an ESTIMATE from operations, bytes and stated efficiencies.

Nothing here has been measured on GPUs. No overlap of communication and computation is assumed, and
every sequence is taken as long as its limit, so that the parts can be read beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.errors import InputError
from parallel.dims import ParallelDims
from parallel.scaling.communication import Volume, ring, sync_volumes, volumes
from parallel.scaling.engine import (
    attention_ranks,
    engine_weight_bytes,
    kv_bytes_per_token,
    kv_capacity_tokens,
)
from parallel.scaling.engine_adapter import pool_bytes, slot_elements
from parallel.scaling.flops import (
    model_flops,
    stage_flops,
    stage_training_flops,
    training_flops,
)
from parallel.scaling.memory import gradient_bytes, optimizer_bytes, weight_bytes
from parallel.scaling.shape import ModelShape
from parallel.scaling.stages import Stage, stages
from parallel.scaling.state import ADAM_MOMENTS, optimizer_shard
from parallel.scaling.workload import Workload


@dataclass(frozen=True)
class Hardware:
    """Hardware is one GPU with its links, from the maker's data sheets; bytes and FLOPs per second."""

    name: str
    memory_bytes: int
    """What a process finds, a little below the name's figure."""
    flops: float
    """bfloat16, dense."""
    hbm: float
    nvlink: float
    """One direction, inside a node."""
    network: float
    """One direction, of one GPU's share between nodes."""
    host: float
    """One direction, to host memory (PCIe 5.0 x16)."""
    gpus_per_node: int = 8
    host_memory_bytes: int = 2 << 40
    """Host memory of one node; 2 TiB is that of NVIDIA's DGX H100 and H200."""


HARDWARE = {
    "h100": Hardware("H100 80 GB", 79 << 30, 989e12, 3.35e12, 450e9, 50e9, 64e9),
    "h200": Hardware("H200 141 GB", 139 << 30, 989e12, 4.8e12, 450e9, 50e9, 64e9),
}


@dataclass(frozen=True)
class Efficiency:
    """Share of the data sheet that real code reaches: assumptions, to be replaced by measurements."""

    flops: float = 0.35
    """The share of the bf16 peak: grouped products of small experts reach less than dense ones."""
    hbm: float = 0.6
    links: float = 0.7
    host: float = 0.7
    bucket_s: float = 0.01
    """Seconds that a weight bucket costs beside its bytes: one request, one answer, one handle."""
    tensor_s: float = 0.2e-3
    """Seconds that an engine takes for one tensor of a bucket beside its bytes: finding its place and
    starting a copy."""
    host_memory: float = 40e9
    """Bytes per second that one rank's share of the host's memory moves, for Adam on the CPU."""


@dataclass(frozen=True)
class StepCost:
    """Seconds by part of one step, and what they come from."""

    seconds: dict[str, float]
    flops: float
    """Tokens of all ranks in one step, rollout included."""
    bubble: float
    """Idle share of the pipeline, on top of its busy time."""
    decode_batch: int
    """Sequences that one engine decodes at a time."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def find_hardware(name: str) -> Hardware:
    """Raises InputError that lists what there is."""
    if name not in HARDWARE:
        raise InputError(f"--gpu: got {name!r}, expected {' or '.join(HARDWARE)}")
    return HARDWARE[name]


def pipeline_bubble(dims: ParallelDims, num_micro_batches: int) -> float:
    """Return (pp - 1) / (vpp m), as a share of the busy time (arXiv 2104.04473, section 2.2.2)."""
    return (dims.pp - 1) / (dims.vpp * num_micro_batches)


def distinct_experts(num_experts: int, topk: int, tokens: float) -> float:
    """Expected number of experts that `tokens` tokens touch in a layer: E (1 - (1 - K / E)^tokens),
    each token's K being a uniform draw."""
    return num_experts * (1 - (1 - topk / num_experts) ** tokens) if num_experts else 0.0


def decode_bytes(shape: ModelShape, work: Workload, batch: float, context: float) -> float:
    """Read by one engine rank for one token of each of `batch` sequences: weights, then the cache."""
    counts = shape.count()
    dense = shape.num_parameters - counts.get("experts", 0)
    dense -= 0 if shape.tied else counts["embedding"]
    expert = 3 * shape.hidden * shape.moe_ffn
    touched = distinct_experts(shape.num_experts, shape.topk, batch) * len(shape.moe_layers)
    weights = work.weight_bytes * (
        dense / attention_ranks(work) + touched * expert / work.engine_tp
    )
    # At most a slot of the adapter; of its experts, those of few tokens are less.
    weights += work.weight_bytes * slot_elements(shape, work)
    return weights + batch / work.engine_dp * context * kv_bytes_per_token(shape, work)


def rollout_seconds(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware, share: Efficiency
) -> tuple[dict[str, float], int]:
    """Estimate prefill (compute bound, one a prompt), decode (HBM bound), and the decode batch."""
    sequences = -(-work.num_sequences // work.num_engines(dims))
    room = kv_capacity_tokens(shape, work, gpu.memory_bytes) // work.sequence_len
    batch = max(1, min(sequences, room))
    rounds = -(-sequences // batch)
    tokens = work.prompts * work.prompt_len
    prefill = tokens * model_flops(shape, work.prompt_len / 2)
    return {
        "prefill": prefill / (work.num_engine_ranks(dims) * gpu.flops * share.flops),
        "decode": rounds * work.response_len * token_seconds(shape, work, gpu, share, batch),
    }, batch


def token_seconds(
    shape: ModelShape, work: Workload, gpu: Hardware, share: Efficiency, batch: int
) -> float:
    """Estimate how long an engine takes for one token of each of `batch` sequences."""
    context = work.prompt_len + work.response_len / 2
    read = decode_bytes(shape, work, batch, context) / (gpu.hbm * share.hbm)
    # Two all-reduces of a layer's vectors over the engine's ranks; their latency is left out.
    vectors = 2 * shape.num_layers * batch * shape.hidden * work.weight_bytes
    link = gpu.nvlink if work.engine_tp <= gpu.gpus_per_node else gpu.network
    reduce = 2 * ring(work.engine_tp, vectors) / (link * share.links)
    return read + reduce


def link_seconds(found: list[Volume], gpu: Hardware, share: Efficiency, part: str) -> float:
    """Estimate the seconds of the `part` (`forward`, `step` or `step+recompute`) of every
    volume, one by one."""
    seconds = 0.0
    for volume in found:
        link = gpu.nvlink if volume.span <= gpu.gpus_per_node else gpu.network
        sent = volume.forward if part == "forward" else volume.step(part == "step+recompute")
        seconds += sent / (link * share.links)
    return seconds


def step_cost(
    shape: ModelShape,
    dims: ParallelDims,
    work: Workload,
    gpu: Hardware,
    share: Efficiency | None = None,
) -> StepCost:
    """One step of the whole loop; pipelines go at the pace of their slowest stage."""
    share = share or Efficiency()
    held = stages(shape, dims)
    context = work.sequence_len / 2
    micro = work.num_micro_batches(dims)
    bubble = pipeline_bubble(dims, micro)
    tokens = micro * work.packed_tokens(dims) * work.optimizer_steps
    ranks, flops = dims.tp * dims.cp, gpu.flops * share.flops
    one_pass = tokens * max(stage_flops(shape, stage, context) for stage in held) / ranks / flops
    both = max(stage_training_flops(shape, stage, context) for stage in held)
    compute = tokens * both / ranks / flops + work.recompute * one_pass
    # Per stage everything that it sends; the slowest stage counts.
    sent = [volumes(shape, dims, work, stage) for stage in held]
    part = "step+recompute" if work.recompute else "step"
    forward = max(link_seconds(found, gpu, share, "forward") for found in sent)
    train = max(link_seconds(found, gpu, share, part) for found in sent)
    steps = work.optimizer_steps
    rollout, batch = rollout_seconds(shape, dims, work, gpu, share)
    seconds = {
        **sync_seconds(shape, dims, work, gpu, share, held),
        **rollout,
        "old log-probs": one_pass * (1 + bubble) + steps * forward,
    }
    if work.reference:
        seconds["reference log-probs"] = seconds["old log-probs"]
    seconds |= {
        "train compute": compute,
        "train bubble": compute * bubble,
        "train communication": steps * train,
        "update": steps * update_seconds(shape, dims, work, gpu, share, held),
    }
    forward_passes = 1 + work.recompute + work.reference
    used = forward_passes * model_flops(shape, context) + training_flops(shape, context)
    used *= work.num_tokens
    prefill = work.prompts * work.prompt_len * model_flops(shape, work.prompt_len / 2)
    decode = work.num_sequences * work.response_len * model_flops(shape, context)
    return StepCost(seconds, used + prefill + decode, bubble, batch)


def update_seconds(
    shape: ModelShape,
    dims: ParallelDims,
    work: Workload,
    gpu: Hardware,
    share: Efficiency,
    held: list[Stage],
) -> float:
    """Adam reads and writes its state, reads gradients and writes weights: HBM bound.

    With offload, gradients go to the host and weights come back, and Adam on the CPU reads and writes
    main parameters and moments there; nothing overlaps.
    """
    moved = max(
        2 * optimizer_bytes(stage, dims, work)
        + gradient_bytes(stage, work)
        + weight_bytes(shape, stage, work)
        - work.weight_bytes * stage.frozen
        for stage in held
    )
    away = work.state.offload_fraction * max(
        optimizer_shard(stage, dims, work.distributed_optimizer).num for stage in held
    )
    over = away * (4 + work.weight_bytes) / (gpu.host * share.host)
    on_host = away * (4 + 2 * (4 + 4 * ADAM_MOMENTS)) / share.host_memory
    return moved / (gpu.hbm * share.hbm) + over + on_host


def sync_seconds(
    shape: ModelShape,
    dims: ParallelDims,
    work: Workload,
    gpu: Hardware,
    share: Efficiency,
    held: list[Stage],
) -> dict[str, float]:
    """Gathers and broadcasts of the export, the engine's copy, and the trainer's way to the host.

    Every bucket and every tensor in it costs time of its own, whatever its size.
    """
    gathered = max(
        link_seconds(sync_volumes(shape, dims, work, stage), gpu, share, "step") for stage in held
    )
    if work.rollout_ranks:
        return {"weight sync: bytes": gathered, **_copy_seconds(shape, dims, work, gpu, share)}
    each = engine_weight_bytes(shape, work)
    loaded = 2 * (pool_bytes(shape, work) if work.lora == "adapter" else each)
    woken = each / (gpu.host * share.host) if work.lora == "adapter" else 0.0
    away = max(weight_bytes(shape, s, work) + optimizer_bytes(s, dims, work) for s in held)
    return {
        "offload and onload": 2 * away / (gpu.host * share.host),
        **({"weight sync: wake the base": woken} if woken else {}),
        "weight sync: bytes": gathered + loaded / (gpu.hbm * share.hbm),
        "weight sync: buckets and tensors": num_buckets(shape, work) * share.bucket_s
        + num_sent_tensors(shape, work) * share.tensor_s,
    }


def _copy_seconds(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware, share: Efficiency
) -> dict[str, float]:
    """Estimate the way of the weights from a trainer rank to the engines of a disaggregated run.

    A trainer rank sends the whole model to each of its workers over one link, and each bucket goes to
    the worker's host before the next one comes. Each rank of an engine then reads the whole model from
    the host's memory.
    """
    whole, buckets = work.sent_bytes(shape), num_buckets(shape, work)
    served = -(-work.num_engines(dims) // dims.world)
    is_near = dims.world + work.rollout_ranks <= gpu.gpus_per_node
    link = gpu.nvlink if is_near else gpu.network
    to_host = whole / (gpu.host * share.host)
    return {
        "weight sync: copy to workers": served * whole / (link * share.links) + to_host,
        "weight sync: buckets": buckets * share.bucket_s,
        "engine: load weights": to_host
        + buckets * share.bucket_s
        + num_sent_tensors(shape, work) * share.tensor_s,
    }


def num_buckets(shape: ModelShape, work: Workload) -> int:
    """That a weight sync sends, full ones."""
    return -(-work.sent_bytes(shape) // work.bucket_bytes)


def num_sent_tensors(shape: ModelShape, work: Workload) -> int:
    """Number of tensors that a weight sync sends."""
    if shape.adapter and work.lora == "adapter":
        return shape.adapter.num_tensors
    return num_hf_tensors(shape)


def num_hf_tensors(shape: ModelShape) -> int:
    """Number of tensors of a Hugging Face checkpoint; q, k, v, gate and up projections count apart."""
    moe = len(shape.moe_layers)
    attention = 4 + 2 * shape.qk_norm + 3 * shape.qkv_bias
    if shape.mla:
        attention = 5 + 2 * (shape.mla.q_rank > 0)  # down, norm and up, twice, and the output
    each_moe = 1 + 3 * shape.num_experts + 3 * (shape.shared_ffn > 0) + shape.shared_gate
    each_moe += shape.expert_bias
    layers = shape.num_layers * (2 + attention) + moe * each_moe + 3 * (shape.num_layers - moe)
    return layers + 2 + (not shape.tied)
