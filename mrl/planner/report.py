"""Show memory, traffic and time of a layout (the plan) as tables, for the terminal (`mrl check
--plan`) and for docs/scaling.md."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.planner.communication import Volume, sync_volumes, volumes
from mrl.planner.cost import StepCost, step_cost
from mrl.planner.deltas import CHANGED, CHANGED_QUANTIZED, delta_cost
from mrl.planner.flops import model_flops
from mrl.planner.hardware import Hardware
from mrl.planner.prefixes import prefix_gain, samples_together
from mrl.planner.roles import all_phases, nodes, worst_phase
from mrl.planner.rollouts import rollout_bytes
from mrl.planner.rows import Phase, Row, total
from mrl.planner.shape import ModelShape
from mrl.planner.stages import Stage, mtp_parts, stages
from mrl.planner.units import count, duration, size
from mrl.planner.workload import Workload
from mrl.shared_prefixes import MIN_GAIN
from parallel.dims import ParallelDims


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> list[Table]:
    """Return the tables of the plan.

    They show the model, GPU memory by phase for each kind of rank, the items of GPU memory at the peak,
    host memory, traffic and the time of a step. Tables without rows are left out.
    """
    found = [
        model_table(shape, work),
        *memory_tables(shape, dims, work, gpu),
        *peak_tables(shape, dims, work, gpu),
        *host_tables(shape, dims, work, gpu),
        communication_table(shape, dims, work),
        rollout_table(shape, dims, work),
        sync_table(shape, dims, work),
        delta_table(shape, dims, work, gpu),
        prefix_table(shape, work),
        cost_table(step_cost(shape, dims, work, gpu), work),
    ]
    return [table for table in found if table.rows]


def model_table(shape: ModelShape, work: Workload) -> Table:
    """Return the table of the model's parameter counts, and of its FLOPs per token."""
    rows = [(name, count(num)) for name, num in shape.count().items() if num]
    rows.append(("all parameters", count(shape.num_parameters)))
    if mtp := mtp_parts(shape):
        rows.append(("MTP layers, beside them", count(sum(part.num for part in mtp))))
    if shape.adapter:
        rows.append(("trained: the adapter", count(shape.adapter.num_parameters)))
        rows.append(("its bytes", size(work.weight_bytes * shape.adapter.num_parameters)))
    rows.append(("active per token", count(shape.num_active)))
    flops = model_flops(shape, work.sequence_len / 2)
    rows.append(("forward FLOPs per token", count(flops)))
    return Table("Parameters (B: billions)", ("what", "how many"), rows)


def shown_stages(shape: ModelShape, dims: ParallelDims) -> list[tuple[str, Stage]]:
    """Return (kind, stage) for each pipeline stage that the tables show.

    The kinds are `first`, `last`, and `middle` for the largest stage between the two. If there is only
    one stage, its kind is `all`.
    """
    found = stages(shape, dims)
    if len(found) == 1:
        return [("all", found[0])]
    middle = max(found[1:-1], key=lambda stage: stage.num_local, default=None)
    shown = [("first", found[0]), ("middle", middle), ("last", found[-1])]
    return [(kind, stage) for kind, stage in shown if stage]


def memory_tables(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware
) -> list[Table]:
    """Return one table per kind of rank, with a row per kind of memory and a column per phase."""
    found = all_phases(shape, dims, work, gpu)
    result = []
    for kind, stage in shown_stages(shape, dims):
        of_stage = [p for p in found if p.stage == stage.index and p.role != "rollout"]
        which = "" if dims.pp == 1 else f" of the {kind} pipeline stage"
        result.append(_phase_table(of_stage, which, gpu))
    if rollout := [phase for phase in found if phase.role == "rollout"]:
        result.append(_phase_table(rollout, "", gpu))
    return result


def _phase_table(phases: list[Phase], which: str, gpu: Hardware) -> Table:
    names = dict.fromkeys(row.name for phase in phases for row in phase.device)
    rows = [
        (name, *(size(n) if (n := phase.device_row(name)) else "" for phase in phases))
        for name in names
    ]
    rows.append(("total", *(size(phase.device_bytes) for phase in phases)))
    role = "" if phases[0].role == "both" else f"{phases[0].role} "
    title = f"GPU memory of one {role}rank{which} by phase ({gpu.name}: {size(gpu.memory_bytes)})"
    return Table(title, ("what", *(phase.name for phase in phases)), rows)


def peak_tables(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware
) -> list[Table]:
    """Return one table per role, with the items of the phase that needs the most GPU memory."""
    found = all_phases(shape, dims, work, gpu)
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
    """Return one table per kind of node, with the items of its host memory."""
    found = nodes(shape, dims, work, gpu)
    tables = []
    for node in found:
        ranks = f" with {each}" if (each := node.describe()) else ""
        assumed = f"assumed to have {size(gpu.host_memory_bytes)}"
        tables.append(
            _itemised(f"Host memory of one node{ranks}, to the byte ({assumed})", node.rows)
        )
    return tables


def _itemised(title: str, items: tuple[Row, ...]) -> Table:
    rows = [(row.name, str(row.num_bytes), f"{row.formula} [{row.source}]") for row in items]
    rows.append(("total", str(total(items)), size(total(items))))
    return Table(title, ("what", "bytes", "formula [source]"), rows)


def communication_table(shape: ModelShape, dims: ParallelDims, work: Workload) -> Table:
    """Return the table of an optimizer step's traffic, for each kind of pipeline stage."""
    rows = [
        _row(volume, kind, work)
        for kind, stage in shown_stages(shape, dims)
        for volume in volumes(shape, dims, work, stage)
    ]
    header = ("traffic", "stage", "forward", "backward", "recompute", "update")
    return Table("Bytes that one rank sends per optimizer step", header, rows)


def rollout_table(shape: ModelShape, dims: ParallelDims, work: Workload) -> Table:
    """Return the table of the traffic that rollouts cause outside the GPUs."""
    rows = [
        (each.name, *(size(n) if n else "" for n in (each.leader, each.rank, each.first)))
        for each in rollout_bytes(shape, dims, work)
    ]
    header = ("rollouts", "an engine's leader sends", "a rank receives", "rank 0 also receives")
    return Table("Bytes of rollouts outside the GPUs per step", header, rows)


def sync_table(shape: ModelShape, dims: ParallelDims, work: Workload) -> Table:
    """Return the table of a weight sync's traffic, for each kind of pipeline stage."""
    rows = [
        (f"{v.name} x{v.group}", kind, size(v.update))
        for kind, stage in shown_stages(shape, dims)
        for v in sync_volumes(shape, dims, work, stage)
    ]
    if work.rollout_ranks:
        rows.append(
            ("copy to the worker of each engine", "rollout", size(work.encoded_bytes(shape)))
        )
    return Table(
        "Bytes that one rank receives per weight sync", ("traffic", "stage", "received"), rows
    )


def delta_table(shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware) -> Table:
    """Return a table with the bytes and seconds of one weight sync of a disaggregated run, in two
    columns: if all weights are sent, and if a delta is sent.

    The table of a colocated run has no rows.
    """
    rows: list[tuple[str, ...]] = []
    if work.rollout_ranks:
        cost = delta_cost(shape, dims, work, gpu)
        share = CHANGED_QUANTIZED if work.quantized else CHANGED[work.weight_bytes]
        pays = "faster" if cost.link < cost.break_even else "not faster"
        here = f"{pays} on this run's {size(cost.link)}/s"
        rows = [
            ("to the worker of an engine", size(cost.full_bytes), size(cost.delta_bytes)),
            ("send to all workers", duration(cost.full_s), duration(cost.delta_s)),
            ("a delta is faster below", "", f"{size(cost.break_even)}/s a link: {here}"),
            (f"assumed: {100 * share:g}% of the elements change", "", "see mrl.planner.deltas"),
        ]
    return Table(
        "One weight sync by rollout.weight_encoding, ESTIMATED from bytes (not measured on GPUs)",
        ("what", "full", "delta"),
        rows,
    )


def prefix_table(shape: ModelShape, work: Workload) -> Table:
    """Return the table of what shared prefixes save; without rows if the recipe does not share."""
    rows: list[tuple[str, ...]] = []
    if work.share_prefixes:
        gain, together = prefix_gain(shape, work), samples_together(work)
        pays = "pays: they are shared" if gain.pays else "does not pay: nothing is shared"
        rows = [
            ("samples of a prompt in a micro-batch", f"{together} of {work.samples}"),
            ("rows", f"{gain.rows:.2f} times fewer; from {MIN_GAIN:g} on it {pays}"),
            ("scores of attention", f"{gain.scores:.2f} times fewer"),
            ("FLOPs of the trainer's passes", f"{gain.flops:.2f} times fewer"),
        ]
    return Table(
        "Shared prefixes, if all samples of a prompt have the same routes in it (docs/prefixes.md)",
        ("what", "with train.share_prefixes=auto"),
        rows,
    )


def _row(volume: Volume, kind: str, work: Workload) -> tuple[str, ...]:
    again = volume.recomputed if work.recompute else 0.0
    parts = (volume.forward, volume.backward, again, volume.update)
    return (f"{volume.name} x{volume.group}", kind, *(size(p) if p else "" for p in parts))


def cost_table(cost: StepCost, work: Workload) -> Table:
    """Return the table of the estimated time of a step."""
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
