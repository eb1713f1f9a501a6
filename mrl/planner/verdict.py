"""Decide whether a layout runs and fits into memory, and otherwise find out what would help."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mrl.errors import InputError
from mrl.planner.engine import engine_weight_bytes, kv_capacity_tokens
from mrl.planner.hardware import Hardware
from mrl.planner.roles import all_phases, nodes, split_engine, worst_phase
from mrl.planner.rows import Phase, Row, present, total
from mrl.planner.shape import ModelShape
from mrl.planner.units import count, size
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims


@dataclass(frozen=True)
class Verdict:
    """Whether a planned layout runs and fits into memory."""

    runs: bool
    text: str
    """The verdict in one line. If the layout does not run or fit, the line says what is missing and
    what to change."""


def worst(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> Phase:
    """Return the phase that needs the most GPU memory, over all roles and pipeline stages."""
    return worst_phase(all_phases(shape, dims, work, gpu))


def worst_node(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware
) -> tuple[Row, ...]:
    """Return the host-memory rows of the node that needs the most host memory."""
    return max((node.rows for node in nodes(shape, dims, work, gpu)), key=total)


def arithmetic(rows: Iterable[Row]) -> str:
    """Return the rows as a sum in words, largest first: `weights 8.04 GB + gradients 1.61 GB + ...`."""
    ordered = sorted(present(rows), key=lambda row: -row.num_bytes)
    return " + ".join(f"{row.name} {size(row.num_bytes)}" for row in ordered)


def verdict(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> Verdict:
    """Return whether the layout runs and fits, and the line that says so.

    If it does not fit, the line says by how much, and which change of a setting would help most.
    """
    wrong = _engine(shape, work, gpu) or split_engine(dims, work, gpu.gpus_per_node)
    if wrong:
        return Verdict(False, f"cannot run: {wrong}")
    peak = worst(shape, dims, work, gpu)
    if peak.device_bytes > gpu.memory_bytes:
        return Verdict(False, _too_much(shape, dims, work, gpu, peak))
    node = worst_node(shape, dims, work, gpu)
    if total(node) > gpu.host_memory_bytes:
        return Verdict(False, _too_much_on_host(node, work, gpu))
    place, spare = _place(peak, dims), gpu.memory_bytes - peak.device_bytes
    if peak.name == "rollout":
        place += f" (the engine takes rollout.mem_fraction_static {work.engine_share:g})"
    tokens = count(kv_capacity_tokens(shape, work, gpu.memory_bytes))
    return Verdict(
        True,
        f"fits: the peak is {place} with {size(peak.device_bytes)}, {size(spare)} below the "
        f"{gpu.name}; KV cache of {tokens} tokens per engine; {size(total(node))} of "
        f"{size(gpu.host_memory_bytes)} of a node's host memory",
    )


def _engine(shape: ModelShape, work: Workload, gpu: Hardware) -> str | None:
    """Return why the engine could not start; None if it could."""
    tokens = kv_capacity_tokens(shape, work, gpu.memory_bytes)
    if work.engine_tp > gpu.gpus_per_node and work.engine_tp % gpu.gpus_per_node:
        return (
            f"an engine on several nodes must use all GPUs of each, and {work.engine_tp} GPUs "
            f"(rollout.tensor_parallel_size) are not a multiple of {gpu.gpus_per_node}; change it"
        )
    if work.lora == "adapter" and work.engine_tp > gpu.gpus_per_node:
        return (
            f"an engine of {work.engine_tp} GPUs (rollout.tensor_parallel_size) spans several nodes, "
            "and such an engine cannot serve an adapter; lower it, or set lora.rollout=merged"
        )
    if tokens >= work.sequence_len:
        return None
    return (
        f"rollout.mem_fraction_static {work.engine_share:g} gives an engine "
        f"{size(int(work.engine_share * gpu.memory_bytes))} per GPU "
        f"({work.engine_share:g} x {size(gpu.memory_bytes)}), its weights need "
        f"{size(engine_weight_bytes(shape, work))}, and the rest is too small for a sequence of "
        f"{work.sequence_len} tokens; raise it, or rollout.tensor_parallel_size"
    )


def _place(peak: Phase, dims: ParallelDims) -> str:
    if peak.role == "rollout":
        return "a rollout rank"
    stage = f" on pipeline stage {peak.stage}" if dims.pp > 1 else ""
    return peak.name + (" on a trainer rank" if peak.role == "trainer" else "") + stage


def _too_much(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware, peak: Phase
) -> str:
    missing = peak.device_bytes - gpu.memory_bytes
    return (
        f"does not fit: {_place(peak, dims)} needs {size(peak.device_bytes)}, {size(missing)} more "
        f"than the {gpu.name} has ({size(gpu.memory_bytes)}): {arithmetic(peak.device)}; "
        f"{_advice(shape, dims, work, gpu, peak)}"
    )


def _too_much_on_host(node: tuple[Row, ...], work: Workload, gpu: Hardware) -> str:
    advice = [
        "checkpoint.async_save=false" * work.async_save,
        "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1" * (work.exact_pinned is None),
        "a lower async.max_staleness" * (work.max_staleness > 0),
        "more nodes",
    ]
    missing = total(node) - gpu.host_memory_bytes
    return (
        f"does not fit: a node needs {size(total(node))} of host memory, {size(missing)} more than the "
        f"{size(gpu.host_memory_bytes)} that it is assumed to have (--host-memory): "
        f"{arithmetic(node)}; what helps is {', or '.join(filter(None, advice))}"
    )


def _advice(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware, peak: Phase
) -> str:
    """Return in words which change of one setting lowers the peak most, or that no change lowers it."""
    answers = [
        (worst(shape, d, w, gpu).device_bytes, text) for text, d, w in _changes(shape, dims, work)
    ]
    if not answers or min(answers)[0] >= peak.device_bytes:
        return "no single setting lowers it: use more GPUs"
    best, text = min(answers)
    rest = best - gpu.memory_bytes
    after = "then it fits" if rest <= 0 else f"then {size(rest)} are still missing"
    return f"what helps most is {text} (saves {size(peak.device_bytes - best)}; {after})"


def _changes(
    shape: ModelShape, dims: ParallelDims, work: Workload
) -> list[tuple[str, ParallelDims, Workload]]:
    """Return plans that may need less memory. Each differs from the given plan in one setting.

    Each plan is (the setting in words, the layout, the workload). Layouts that the model or the number
    of ranks does not allow are left out.
    """
    options: list[tuple[str, ParallelDims, Workload]] = []
    for key, changed in (
        ("tensor_model_parallel_size", {"tp": 2 * dims.tp}),
        ("expert_model_parallel_size", {"ep": 2 * dims.ep}),
        ("pipeline_model_parallel_size", {"pp": 2 * dims.pp}),
    ):
        leaner = dataclasses.replace(dims, **changed)
        if _runs(shape, leaner):
            (value,) = changed.values()
            options.append((f"parallel.{key}={value}", leaner, work))
    for key, changes, allowed in _leaner_work(work):
        if allowed:
            options.append((key, dims, dataclasses.replace(work, **changes)))
    return options


def _leaner_work(work: Workload) -> list[tuple[str, dict[str, Any], bool]]:
    state, half = work.state, work.micro_batch_tokens // 2
    offloaded = dataclasses.replace(state, offload_fraction=1.0, precision_aware=True, main_bytes=4,
                                    exp_avg_bytes=4, exp_avg_sq_bytes=4)  # fmt: skip
    bucket = min(work.bucket_bytes // 2, 2 << 30)  # `auto` chooses at most 2 GiB
    narrow = dataclasses.replace(state, gradient_bytes=work.weight_bytes)
    instead = " in place of megatron.recompute_granularity" * bool(work.recompute_modules)
    return [
        (f"train.recompute=true{instead}", {"recompute": True}, not work.recompute),
        (
            "optimizer.use_distributed_optimizer=true",
            {"distributed_optimizer": True},
            not work.distributed_optimizer,
        ),
        (
            "megatron.optimizer_cpu_offload=true with optimizer_offload_fraction=1 and "
            "use_precision_aware_optimizer=true",
            {"state": offloaded},
            # `parallel.options.rules` refuses it for fp32 weights.
            work.divides_ranges and state.offload_fraction < 1 and work.weight_bytes < 4,
        ),
        ("megatron.grad_reduce_in_fp32=false", {"state": narrow}, narrow != state),
        (
            "train.logprob_chunk_tokens=1024",
            {"logprob_chunk_tokens": 1024},
            not work.logprob_chunk_tokens,
        ),
        (
            f"train.micro_batch_tokens={half}",
            {"micro_batch_tokens": half},
            work.micro_batch_tokens >= 2 * work.sequence_len,
        ),
        (
            f"rollout.mem_fraction_static={work.engine_share - 0.1:.2g}",
            {"engine_share": work.engine_share - 0.1},
            work.engine_share > 0.3,
        ),
        (
            f"rollout.weight_bucket_mb={bucket >> 20}",
            {"bucket_bytes": bucket},
            work.bucket_bytes >= 2 << 20,
        ),
    ]


def _runs(shape: ModelShape, dims: ParallelDims) -> bool:
    """Return whether the layout's parallel sizes divide the number of ranks and the model's sizes."""
    dense, expert = dims.tp * dims.cp * dims.pp, dims.ep * dims.etp * dims.pp
    try:
        dims.check_model(shape.sizes)
    except InputError:
        return False
    return not (dims.world % dense or dims.world % expert)
