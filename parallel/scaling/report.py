"""The plan is shown as tables: on the terminal (`mrl check --plan`) and in docs/scaling.md."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.dims import ParallelDims
from parallel.scaling.communication import Volume, sync_volumes, volumes
from parallel.scaling.cost import Hardware, StepCost, step_cost
from parallel.scaling.flops import model_flops
from parallel.scaling.roles import all_phases, nodes, worst_phase
from parallel.scaling.rollouts import rollout_bytes
from parallel.scaling.rows import Phase, Row, total
from parallel.scaling.shape import ModelShape
from parallel.scaling.stages import stages
from parallel.scaling.units import count, duration, size
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


def tables(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> list[Table]:
    """Model, memory by phase and kind of rank, the peak byte by byte, the host, traffic, step cost."""
    found = [
        model_table(shape, work),
        *memory_tables(shape, dims, work, gpu),
        *peak_tables(shape, dims, work, gpu),
        *host_tables(shape, dims, work, gpu),
        communication_table(shape, dims, work),
        rollout_table(shape, dims, work),
        sync_table(shape, dims, work),
        cost_table(step_cost(shape, dims, work, gpu), work),
    ]
    return [table for table in found if table.rows]


def model_table(shape: ModelShape, work: Workload) -> Table:
    rows = [(name, count(num)) for name, num in shape.count().items() if num]
    rows.append(("all parameters", count(shape.num_parameters)))
    if shape.adapter:
        rows.append(("trained: the adapter", count(shape.adapter.num_parameters)))
        rows.append(("its bytes", size(work.weight_bytes * shape.adapter.num_parameters)))
    rows.append(("active per token", count(shape.num_active)))
    flops = model_flops(shape, work.sequence_len / 2)
    rows.append(("forward FLOPs per token", count(flops)))
    return Table("Parameters (B: billions)", ("what", "how many"), rows)


def kinds_of_ranks(shape: ModelShape, dims: ParallelDims) -> dict[int, str]:
    """Choose one stage for each kind of pipeline rank: first, last, and the largest between them."""
    held = stages(shape, dims)
    if len(held) == 1:
        return {0: "all"}
    kinds = {0: "first", len(held) - 1: "last"}
    if middle := held[1:-1]:
        kinds[max(middle, key=lambda stage: stage.num_local).index] = "middle"
    return dict(sorted(kinds.items()))


def memory_tables(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware
) -> list[Table]:
    """One for each kind of pipeline rank: what is held (down) in each phase (across)."""
    found = all_phases(shape, dims, work, gpu.memory_bytes, gpu.gpus_per_node)
    result = []
    for index, kind in kinds_of_ranks(shape, dims).items():
        held = [phase for phase in found if phase.stage == index and phase.role != "rollout"]
        which = "" if dims.pp == 1 else f" of the {kind} pipeline stage"
        result.append(_phase_table(held, which, gpu))
    if apart := [phase for phase in found if phase.role == "rollout"]:
        result.append(_phase_table(apart, "", gpu))
    return result


def _phase_table(held: list[Phase], which: str, gpu: Hardware) -> Table:
    names = dict.fromkeys(row.name for phase in held for row in phase.device)
    rows = [
        (name, *(size(n) if (n := phase.device_row(name)) else "" for phase in held))
        for name in names
    ]
    rows.append(("total", *(size(phase.device_bytes) for phase in held)))
    role = "" if held[0].role == "both" else f"{held[0].role} "
    title = f"GPU memory of one {role}rank{which} by phase ({gpu.name}: {size(gpu.memory_bytes)})"
    return Table(title, ("what", *(phase.name for phase in held)), rows)


def peak_tables(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware
) -> list[Table]:
    """Show the phase of each role that needs most, row by row, with formula and source of each."""
    found = all_phases(shape, dims, work, gpu.memory_bytes, gpu.gpus_per_node)
    tables = []
    for role in dict.fromkeys(phase.role for phase in found):
        peak = worst_phase([phase for phase in found if phase.role == role])
        place = peak.name + (f" on pipeline stage {peak.stage}" if dims.pp > 1 else "")
        if role != "both":
            place = f"{role} rank" + (f", {place}" if role == "trainer" else "")
        tables.append(_itemised(f"GPU memory at the peak, to the byte: {place}", peak.device))
    return tables


def host_tables(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware
) -> list[Table]:
    """Show the node that needs most host memory, row by row; where roles are apart, every kind of
    node."""
    found = nodes(shape, dims, work, gpu.memory_bytes, gpu.gpus_per_node)
    tables = []
    for node in found:
        ranks = f" with {each}" if (each := node.describe()) else ""
        taken = f"taken to have {size(gpu.host_memory_bytes)}"
        tables.append(
            _itemised(f"Host memory of one node{ranks}, to the byte ({taken})", node.rows)
        )
    return tables


def _itemised(title: str, held: tuple[Row, ...]) -> Table:
    rows = [(row.name, str(row.num_bytes), f"{row.formula} [{row.source}]") for row in held]
    rows.append(("total", str(total(held)), size(total(held))))
    return Table(title, ("what", "bytes", "formula [source]"), rows)


def communication_table(shape: ModelShape, dims: ParallelDims, work: Workload) -> Table:
    rows = []
    for stage in stages(shape, dims):
        kind = kinds_of_ranks(shape, dims).get(stage.index)
        if kind is not None:
            rows += [_row(v, kind, work) for v in volumes(shape, dims, work, stage)]
    header = ("traffic", "stage", "forward", "backward", "recompute", "update")
    return Table("Bytes that one rank sends per optimizer step", header, rows)


def rollout_table(shape: ModelShape, dims: ParallelDims, work: Workload) -> Table:
    rows = [
        (each.name, *(size(n) if n else "" for n in (each.leader, each.rank, each.first)))
        for each in rollout_bytes(shape, dims, work)
    ]
    header = ("rollouts", "an engine's leader sends", "a rank receives", "rank 0 besides")
    return Table("Bytes of rollouts outside the GPUs per step", header, rows)


def sync_table(shape: ModelShape, dims: ParallelDims, work: Workload) -> Table:
    rows = []
    for stage in stages(shape, dims):
        kind = kinds_of_ranks(shape, dims).get(stage.index)
        if kind is not None:
            rows += [
                (f"{v.name} x{v.group}", kind, size(v.update))
                for v in sync_volumes(shape, dims, work, stage)
            ]
    if work.rollout_ranks:
        rows.append(("copy to the worker of each engine", "rollout", size(work.sent_bytes(shape))))
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
    turns = " of roles that take turns" if work.rollout_ranks else ""
    return Table(
        f"One step{turns}, ESTIMATED from FLOPs and bytes (no latencies, no overlap; not measured on "
        "GPUs)",
        ("part", "value", "share"),
        rows,
    )
