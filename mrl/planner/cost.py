"""Estimate the seconds of one step from FLOPs, bytes and assumed efficiencies.

Nothing here has been measured on GPUs. The estimates serve to compare the parts of a step. They
assume that communication and computation do not overlap, and that every sequence has the largest
length that the recipe allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.planner.communication import Volume, ring, sync_volumes, volumes
from mrl.planner.deltas import copy_seconds
from mrl.planner.engine import engine_weight_bytes, kv_bytes_per_token, kv_capacity_tokens
from mrl.planner.engine_adapter import pool_bytes, slot_elements
from mrl.planner.flops import model_flops, stage_flops, stage_training_flops
from mrl.planner.hardware import EFFICIENCY, Hardware
from mrl.planner.memory import gradient_bytes, optimizer_bytes, weight_bytes
from mrl.planner.muon import newton_schulz_flops
from mrl.planner.prefixes import prefix_speed
from mrl.planner.shape import ModelShape
from mrl.planner.stages import Stage, stages
from mrl.planner.state import ADAM_MOMENTS
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims


@dataclass(frozen=True)
class StepCost:
    """The estimated seconds of a step by part, and figures that explain them."""

    seconds: dict[str, float]
    bubble: float
    """Idle time of the pipeline relative to its busy time."""
    decode_batch: int
    """Number of sequences that one engine decodes at the same time."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def pipeline_bubble(dims: ParallelDims, num_micro_batches: int) -> float:
    """Return the pipeline's idle time relative to its busy time, (pp - 1) / (vpp m).

    The formula is from arXiv 2104.04473, section 2.2.2, for m micro-batches.
    """
    return (dims.pp - 1) / (dims.vpp * num_micro_batches)


def distinct_experts(num_experts: int, topk: int, tokens: float) -> float:
    """Return the expected number of experts that `tokens` tokens use in a layer.

    It is E (1 - (1 - K / E)^tokens), with E = `num_experts` and K = `topk`, if each token draws its
    K experts uniformly at random.
    """
    return num_experts * (1 - (1 - topk / num_experts) ** tokens) if num_experts else 0.0


def decode_bytes(shape: ModelShape, work: Workload, batch: float, context: float) -> float:
    """Return the bytes that one engine rank reads to decode one token for each of `batch` sequences.

    These are the weights and the KV cache of `context` tokens per sequence. Of the experts, only those
    that the batch is expected to use are counted.
    """
    counts = shape.count()
    dense = shape.num_parameters - counts.get("experts", 0)
    dense -= 0 if shape.tied else counts["embedding"]
    expert = 3 * shape.hidden * shape.moe_ffn
    touched = distinct_experts(shape.num_experts, shape.topk, batch) * len(shape.moe_layers)
    weights = work.weight_bytes * (dense / work.attention_ranks + touched * expert / work.engine_tp)
    # An upper bound for the adapter: with few tokens, not all of its experts are read.
    weights += work.weight_bytes * slot_elements(shape, work)
    return weights + batch / work.engine_dp * context * kv_bytes_per_token(shape, work)


def rollout_seconds(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware
) -> tuple[dict[str, float], int]:
    """Estimate the seconds of prefill and decode.

    Return two values: a dict with the seconds of `prefill` and of `decode`, and the number of
    sequences that an engine decodes at the same time. Prefill is compute bound and happens once per
    prompt. Decode is bound by HBM bandwidth.
    """
    sequences = -(-work.num_sequences // work.num_engines(dims))
    room = kv_capacity_tokens(shape, work, gpu.memory_bytes) // work.sequence_len
    batch = max(1, min(sequences, room))
    rounds = -(-sequences // batch)
    tokens = work.prompts * work.prompt_len
    prefill = tokens * model_flops(shape, work.prompt_len / 2)
    return {
        "prefill": prefill / (work.num_engine_ranks(dims) * gpu.flops * EFFICIENCY.flops),
        "decode": rounds * work.response_len * token_seconds(shape, work, gpu, batch),
    }, batch


def token_seconds(shape: ModelShape, work: Workload, gpu: Hardware, batch: int) -> float:
    """Estimate how long an engine takes to decode one token for each of `batch` sequences."""
    context = work.prompt_len + work.response_len / 2
    read = decode_bytes(shape, work, batch, context) / (gpu.hbm * EFFICIENCY.hbm)
    # Two all-reduces per layer over the engine's ranks; their latency is left out.
    vectors = 2 * shape.num_layers * batch * shape.hidden * work.weight_bytes
    link = gpu.nvlink if work.engine_tp <= gpu.gpus_per_node else gpu.network
    reduce = 2 * ring(work.engine_tp, vectors) / (link * EFFICIENCY.links)
    return read + reduce


def link_seconds(found: list[Volume], gpu: Hardware, part: str) -> float:
    """Estimate the seconds to send all traffic in `found`, one volume after the other.

    `part` selects the bytes of each volume: `forward` (the bytes of the forward pass), `step` (the
    bytes of a whole optimizer step) or `step+recompute` (the bytes of an optimizer step that also
    recomputes forward passes).
    """
    seconds = 0.0
    for volume in found:
        link = gpu.nvlink if volume.span <= gpu.gpus_per_node else gpu.network
        sent = volume.forward if part == "forward" else volume.step(part == "step+recompute")
        seconds += sent / (link * EFFICIENCY.links)
    return seconds


def step_cost(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> StepCost:
    """Estimate the cost of one training step. The slowest stage determines the time of a pipeline.

    With shared prefixes, fewer FLOPs are counted (`prefix_speed`), and as much communication as
    without.
    """
    held = stages(shape, dims)
    context = work.sequence_len / 2
    micro = work.num_micro_batches(dims)
    bubble = pipeline_bubble(dims, micro)
    tokens = micro * work.packed_tokens(dims) * work.optimizer_steps
    ranks, flops = dims.tp * dims.cp, gpu.flops * EFFICIENCY.flops * prefix_speed(shape, work)
    one_pass = tokens * max(stage_flops(shape, stage, context) for stage in held) / ranks / flops
    both = max(stage_training_flops(shape, stage, context) for stage in held)
    compute = tokens * both / ranks / flops + work.recompute * one_pass
    # The times to send all volumes of a stage are added up; the slowest stage counts.
    sent = [volumes(shape, dims, work, stage) for stage in held]
    part = "step+recompute" if work.recompute else "step"
    forward = max(link_seconds(found, gpu, "forward") for found in sent)
    train = max(link_seconds(found, gpu, part) for found in sent)
    steps = work.optimizer_steps
    rollout, batch = rollout_seconds(shape, dims, work, gpu)
    seconds = {
        **sync_seconds(shape, dims, work, gpu, held),
        **rollout,
    }
    logprobs = one_pass * (1 + bubble) + steps * forward
    if work.logprob_pass:
        seconds["old log-probs"] = logprobs
    if work.reference:
        seconds["reference log-probs"] = logprobs
    seconds |= {
        "train compute": compute,
        "train bubble": compute * bubble,
        "train communication": steps * train,
        "update": steps * update_seconds(shape, dims, work, gpu, held),
    }
    return StepCost(seconds, bubble, batch)


def update_seconds(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware, held: list[Stage]
) -> float:
    """Estimate the seconds of one update: Adam's, which is bound by HBM bandwidth, and the products of
    Muon's orthogonalisations.

    `held` has all pipeline stages; the stage that moves the most bytes determines the time.

    Adam reads and writes its state, reads gradients and writes weights. For the offloaded share of the
    state, gradients are copied to the host, Adam reads and writes main parameters and moments there,
    and weights are copied back. These steps are assumed not to overlap.
    """
    moved = max(
        2 * optimizer_bytes(stage, dims, work)
        + gradient_bytes(stage, work)
        + weight_bytes(shape, stage, dims, work)
        - work.weight_bytes * stage.frozen
        for stage in held
    )
    away = work.state.offload_fraction * max(
        work.optimizer_shard(stage, dims).num for stage in held
    )
    over = away * (4 + work.weight_bytes) / (gpu.host * EFFICIENCY.host)
    on_host = away * (4 + 2 * (4 + 4 * ADAM_MOMENTS)) / EFFICIENCY.host_memory
    products = max(newton_schulz_flops(shape, stage, dims, work) for stage in held)
    return (
        moved / (gpu.hbm * EFFICIENCY.hbm)
        + over
        + on_host
        + products / (gpu.flops * EFFICIENCY.flops)
    )


def sync_seconds(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware, held: list[Stage]
) -> dict[str, float]:
    """Estimate the seconds of each part of a weight sync.

    The parts are the collectives of the export, the engine's copy of the weights and, in colocated
    runs, moving the trainer's state to the host and back. If a colocated run sends only the
    adapter, moving the base model back into the engine's GPU memory is one more part. The weights
    are sent in buckets. Each bucket and each tensor costs a fixed time in addition to the time to
    copy its bytes.
    """
    gathered = max(
        link_seconds(sync_volumes(shape, dims, work, stage), gpu, "step") for stage in held
    )
    if work.rollout_ranks:
        return {"weight sync: bytes": gathered, **_copy_seconds(shape, dims, work, gpu)}
    each = engine_weight_bytes(shape, work)
    loaded = 2 * (pool_bytes(shape, work) if work.lora == "adapter" else each)
    woken = each / (gpu.host * EFFICIENCY.host) if work.lora == "adapter" else 0.0
    away = max(weight_bytes(shape, s, dims, work) + optimizer_bytes(s, dims, work) for s in held)
    return {
        "offload and onload": 2 * away / (gpu.host * EFFICIENCY.host),
        **({"weight sync: wake the base": woken} if woken else {}),
        "weight sync: bytes": gathered + loaded / (gpu.hbm * EFFICIENCY.hbm),
        "weight sync: buckets and tensors": num_buckets(shape, work) * EFFICIENCY.bucket_s
        + num_sent_tensors(shape, work) * EFFICIENCY.tensor_s,
    }


def _copy_seconds(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware
) -> dict[str, float]:
    """Estimate the seconds to copy the weights from the trainers to the engines of a disaggregated run.

    A trainer rank sends the weights over one link to the worker of each engine that it serves. The
    rank sends the whole model or, with deltas, only the elements that changed. Each bucket is
    copied to the worker's host memory before the next bucket is sent. Then each rank of the engine
    reads the whole model from the worker's host memory.
    """
    whole, buckets = work.encoded_bytes(shape), num_buckets(shape, work)
    to_host = whole / (gpu.host * EFFICIENCY.host)
    return {
        "weight sync: copy to workers": copy_seconds(shape, dims, work, gpu),
        "weight sync: buckets": buckets * EFFICIENCY.bucket_s,
        "engine: load weights": to_host
        + buckets * EFFICIENCY.bucket_s
        + num_sent_tensors(shape, work) * EFFICIENCY.tensor_s,
    }


def num_buckets(shape: ModelShape, work: Workload) -> int:
    """Return the number of buckets of a weight sync, assuming that all but the last are full."""
    return -(-work.sent_bytes(shape) // work.bucket_bytes)


def num_sent_tensors(shape: ModelShape, work: Workload) -> int:
    """Return the number of tensors that a weight sync sends."""
    if shape.adapter and work.lora == "adapter":
        return shape.adapter.num_tensors
    return num_hf_tensors(shape)


def num_hf_tensors(shape: ModelShape) -> int:
    """Return the number of tensors in a Hugging Face checkpoint of the model.

    Query, key, value, gate and up projections are separate tensors.
    """
    moe = len(shape.moe_layers)
    attention = 4 + 2 * shape.qk_norm + 3 * shape.qkv_bias + shape.linear_bias + shape.sinks
    if shape.mla:
        attention = 5 + 2 * (shape.mla.q_rank > 0)  # down, norm and up, twice, and the output
        attention += 5 * (shape.indexer is not None)
    each_moe = 1 + 3 * shape.num_experts + 3 * (shape.shared_ffn > 0) + shape.shared_gate
    each_moe += shape.expert_bias + shape.linear_bias * (1 + 3 * shape.num_experts)
    linear = len(shape.linear.layers) * (7 - attention) if shape.linear else 0
    layers = (
        linear + shape.num_layers * (2 + attention) + moe * each_moe + 3 * (shape.num_layers - moe)
    )
    return layers + 2 + (not shape.tied)
