"""The plan as tables: for the terminal (`mrl check --plan`) and for docs/scaling.md."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mrl.errors import InputError
from parallel.dims import ParallelDims
from parallel.scaling.communication import Volume, sync_volumes, volumes
from parallel.scaling.cost import Hardware, StepCost, model_flops, step_cost
from parallel.scaling.memory import Phase, engine_weight_bytes, kv_capacity_tokens, phases
from parallel.scaling.shape import ModelShape
from parallel.scaling.stages import stages
from parallel.scaling.workload import Workload


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"**{self.title}**\n\n{text}"


def size(num_bytes: float) -> str:
    """Decimal units, three figures: `1.23 GB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.3g} {unit}" if abs(num_bytes) < 999.5 * scale else (
                f"{num_bytes / scale:.0f} {unit}"
            )  # fmt: skip
    return f"{num_bytes:.0f} B"


def count(num: float) -> str:
    """Three or four figures: `30.53 B`, `8.192 k`."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if num >= scale:
            return f"{num / scale:.4g} {unit}"
    return f"{num:.4g}"


def duration(seconds: float) -> str:
    """`1.2 s`, `34 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def tables(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> list[Table]:
    """Model, memory by phase and kind of rank, traffic, step cost."""
    found = [
        model_table(shape, work),
        memory_table(shape, dims, work, gpu),
        communication_table(shape, dims, work),
        sync_table(shape, dims, work),
        cost_table(step_cost(shape, dims, work, gpu), work),
    ]
    return [table for table in found if table.rows]


def model_table(shape: ModelShape, work: Workload) -> Table:
    rows = [(name, count(num)) for name, num in shape.count().items() if num]
    rows.append(("all parameters", count(shape.num_parameters)))
    rows.append(("active per token", count(shape.num_active)))
    flops = model_flops(shape, work.sequence_len / 2)
    rows.append(("forward FLOPs per token", count(flops)))
    return Table("Parameters (B: billions)", ("what", "how many"), rows)


def kinds_of_ranks(shape: ModelShape, dims: ParallelDims) -> dict[int, str]:
    """One stage for each kind of pipeline rank: first, last, and the largest between them."""
    held = stages(shape, dims)
    if len(held) == 1:
        return {0: "all"}
    kinds = {0: "first", len(held) - 1: "last"}
    if middle := held[1:-1]:
        kinds[max(middle, key=lambda stage: stage.num_local).index] = "middle"
    return dict(sorted(kinds.items()))


def memory_table(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> Table:
    kinds = kinds_of_ranks(shape, dims)
    rows = []
    for phase in phases(shape, dims, work, gpu.memory_bytes):
        if phase.stage in kinds:
            parts = ", ".join(f"{name} {size(n)}" for name, n in phase.device.items() if n)
            fits = "" if phase.device_bytes <= gpu.memory_bytes else " (too much)"
            rows.append((phase.name, kinds[phase.stage], size(phase.device_bytes) + fits,
                         size(phase.host_bytes), parts))  # fmt: skip
    title = f"Memory of one rank by phase and pipeline stage ({gpu.name}: {size(gpu.memory_bytes)})"
    return Table(title, ("phase", "stage", "GPU", "host", "on the GPU"), rows)


def communication_table(shape: ModelShape, dims: ParallelDims, work: Workload) -> Table:
    rows = []
    for stage in stages(shape, dims):
        kind = kinds_of_ranks(shape, dims).get(stage.index)
        if kind is not None:
            rows += [_row(v, kind, work) for v in volumes(shape, dims, work, stage)]
    header = ("traffic", "stage", "forward", "backward", "recompute", "update")
    return Table("Bytes that one rank sends per optimizer step", header, rows)


def sync_table(shape: ModelShape, dims: ParallelDims, work: Workload) -> Table:
    rows = []
    for stage in stages(shape, dims):
        kind = kinds_of_ranks(shape, dims).get(stage.index)
        if kind is not None:
            rows += [
                (f"{v.name} x{v.group}", kind, size(v.update))
                for v in sync_volumes(shape, dims, work, stage)
            ]
    return Table(
        "Bytes that one rank receives per weight sync", ("traffic", "stage", "received"), rows
    )


def _row(volume: Volume, kind: str, work: Workload) -> tuple[str, ...]:
    again = volume.recomputed if work.recompute else 0.0
    parts = (volume.forward, volume.backward, again, volume.update)
    return (f"{volume.name} x{volume.group}", kind, *(size(p) if p else "" for p in parts))


def cost_table(cost: StepCost, work: Workload) -> Table:
    rows = [(name, duration(s), f"{100 * s / cost.total:.0f}%") for name, s in cost.seconds.items()]
    rows.append(("one step", duration(cost.total), "100%"))
    rate = work.num_tokens / cost.total
    rows.append(("tokens", f"{work.num_tokens} of {work.num_sequences} sequences",
                 f"{rate:.4g}/s"))  # fmt: skip
    rows.append(("pipeline bubble", f"{100 * cost.bubble:.3g}% of the busy time", ""))
    rows.append(("decode batch", f"{cost.decode_batch} sequences an engine", ""))
    return Table(
        "One step, ESTIMATED from FLOPs and bytes (no latencies, no overlap; not measured on GPUs)",
        ("part", "value", "share"),
        rows,
    )


def worst(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> Phase:
    """The phase and stage that needs most of its GPU."""
    return max(phases(shape, dims, work, gpu.memory_bytes), key=lambda phase: phase.device_bytes)


def verdict(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> str:
    """One line: whether it runs and fits, and where not, by how much and what would help most."""
    fit = _fit(shape, dims, work, gpu)
    tokens = kv_capacity_tokens(shape, work, gpu.memory_bytes)
    if tokens < work.prompt_len + work.response_len:
        share = size(int(work.engine_share * gpu.memory_bytes))
        weights = size(engine_weight_bytes(shape, work))
        return (
            f"cannot run: rollout.mem_fraction_static {work.engine_share:g} gives an engine {share} a "
            f"GPU, its weights need {weights}, and what is left holds no sequence of "
            f"{work.prompt_len + work.response_len} tokens; raise it, or "
            f"rollout.tensor_parallel_size; apart from that it {fit.partition(';')[0]}"
        )
    if work.engine_tp <= gpu.gpus_per_node:
        return fit
    return (
        f"cannot run: engines of {work.engine_tp} GPUs (rollout.tensor_parallel_size), but an engine "
        f"stays on one node, taken to have {gpu.gpus_per_node}; apart from that it {fit}"
    )


def _fit(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> str:
    peak = worst(shape, dims, work, gpu)
    place = peak.name + (f" on pipeline stage {peak.stage}" if dims.pp > 1 else "")
    spare = gpu.memory_bytes - peak.device_bytes
    if spare >= 0:
        tokens = count(kv_capacity_tokens(shape, work, gpu.memory_bytes))
        if peak.name == "rollout":
            place += f" (the engine takes rollout.mem_fraction_static {work.engine_share:g})"
        return (
            f"fits: the peak is {place} with {size(peak.device_bytes)}, {size(spare)} below the "
            f"{gpu.name}; KV cache of {tokens} tokens an engine"
        )
    return (
        f"does not fit: {place} needs {size(peak.device_bytes)}, {size(-spare)} more than the "
        f"{gpu.name} has; {_advice(shape, dims, work, gpu, peak)}"
    )


def _advice(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware, peak: Phase
) -> str:
    """The one change of a setting that lowers the peak most."""
    answers = [
        (worst(shape, d, w, gpu).device_bytes, text)
        for text, d, w in _changes(shape, dims, work, gpu)
    ]
    if not answers or min(answers)[0] >= peak.device_bytes:
        return "no single setting lowers it: use more GPUs"
    best, text = min(answers)
    rest = best - gpu.memory_bytes
    after = "then it fits" if rest <= 0 else f"then {size(rest)} are still missing"
    return f"what helps most is {text} (saves {size(peak.device_bytes - best)}; {after})"


def _changes(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware
) -> list[tuple[str, ParallelDims, Workload]]:
    """Every setting made one notch leaner, where the model and the world allow it."""
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
    for key, changes, allowed in (
        ("train.recompute=true", {"recompute": True}, not work.recompute),
        (
            "optimizer.use_distributed_optimizer=true",
            {"distributed_optimizer": True},
            not work.distributed_optimizer,
        ),
        (
            f"train.micro_batch_tokens={work.micro_batch_tokens // 2}",
            {"micro_batch_tokens": work.micro_batch_tokens // 2},
            work.micro_batch_tokens >= 2 * work.sequence_len,
        ),
        (
            f"rollout.tensor_parallel_size={2 * work.engine_tp}",
            {"engine_tp": 2 * work.engine_tp},
            min(dims.world, gpu.gpus_per_node) % (2 * work.engine_tp) == 0
            and shape.kv_heads % (2 * work.engine_tp) == 0,
        ),
        (
            f"rollout.weight_bucket_mb={(work.bucket_bytes >> 20) // 2}",
            {"bucket_bytes": work.bucket_bytes // 2},
            work.bucket_bytes >= 2 << 20,
        ),
    ):
        if allowed:
            options.append((key, dims, dataclasses.replace(work, **changes)))
    return options


def _runs(shape: ModelShape, dims: ParallelDims) -> bool:
    """Whether the world and the model divide into the layout."""
    dense, expert = dims.tp * dims.cp * dims.pp, dims.ep * dims.etp * dims.pp
    try:
        dims.check_model(shape.sizes)
    except InputError:
        return False
    return not (dims.world % dense or dims.world % expert)
