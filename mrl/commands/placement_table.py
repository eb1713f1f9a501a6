"""`mrl check --plan` shows how long a step takes in each placement, and which side waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.config import Recipe
from mrl.config.asynchronous import AsyncConfig
from mrl.errors import InputError
from mrl.preflight.expected_times import Expected, expected_times
from mrl.preflight.measured_times import MeasuredRun, read_measured
from mrl.preflight.placement import ExpectedStep, StepTimes, expected_step_s
from parallel.dims import ParallelDims
from parallel.scaling.cost import Hardware
from parallel.scaling.report import Table
from parallel.scaling.shape import ModelShape
from parallel.scaling.units import duration
from parallel.scaling.verdict import verdict
from parallel.scaling.workload import Workload

BOUNDS = (1, 2, 4)
HEADER = ("placement", "one step", "trainer waits", "engines wait", "tail", "who waits")
TAIL = "tail: engines work with empty places, because the step or new weights wait for slow groups"
ALL_DEVICES = (
    "not measured: how long either part takes on all devices; give a colocated run of the recipe as "
    "well (--measured RUN RUN)"
)
OWN_DEVICES = (
    "not measured: how long either role takes on ranks of its own; give a run with "
    "rollout.placement=disaggregated and async.max_staleness=0 (--measured RUN RUN)"
)


@dataclass(frozen=True)
class Known:
    """What is known of a step in either placement, or why it is not."""

    colocated: StepTimes | str
    apart: StepTimes | str
    """Each role has ranks of its own."""
    spread: float
    colocated_spread: float = 1.0


def planned_tables(
    recipe: Recipe,
    shape: ModelShape,
    dims: ParallelDims,
    work: Workload,
    gpu: Hardware,
    mean_response_len: int | None,
) -> tuple[list[Table], str]:
    """Return the tables of a disaggregated recipe on GPUs, and which side waits. Raises InputError."""
    longest = work.response_len
    mean = longest if mean_response_len is None else mean_response_len
    if not 1 <= mean <= longest:
        raise InputError(
            f"--response-len: got {mean}, expected 1 to rollout.max_response_len, which is {longest}"
        )
    apart = expected_times(shape, dims, work, gpu, mean)
    colocated = _colocated(recipe, shape, dims, work, gpu, mean)
    known = Known(
        colocated if isinstance(colocated, str) else colocated.times,
        apart.times,
        apart.spread,
        1.0 if isinstance(colocated, str) else colocated.spread,
    )
    title = (
        f"One step by placement, ESTIMATED for {gpu.name}, responses of {mean} tokens on average and "
        f"{longest} at most ({TAIL})"
    )
    tables = [_parts_table(apart, gpu), _table(title, known, recipe.asynchronous)]
    return tables, says(known, recipe.asynchronous)


def measured_tables(folders: Sequence[Path], config: AsyncConfig | None) -> tuple[list[Table], str]:
    """Return the same from what runs have measured. `config` is None for a colocated recipe.

    Raises InputError for two runs of one kind: one colocated, one disaggregated are expected.
    """
    runs = [read_measured(folder) for folder in folders]
    together = [run for run in runs if run.placement == "colocated"]
    apart = [run for run in runs if run.placement != "colocated"]
    for kind, found in (("colocated", together), ("disaggregated", apart)):
        if len(found) > 1:
            raise InputError(
                f"--measured: {found[0].folder} and {found[1].folder} are both {kind}; give one "
                "colocated run, one disaggregated run, or one of each"
            )
    known = Known(
        _known(together, ALL_DEVICES),
        _known(apart, OWN_DEVICES),
        _spread(apart),
        _spread(together),
    )
    rows = [row for run in runs for row in _measured_rows(run)]
    title = (
        f"One step by placement, from what was measured ({TAIL}; its size is an assumption: the "
        "longest response over the mean one, in engines that are as fast with few as with many)"
    )
    tables = [
        Table("Seconds of a step's parts", ("role", "part", "seconds", "source"), rows),
        _table(title, known, config or AsyncConfig()),
    ]
    return tables, says(known, config) if config is not None else ""


def says(known: Known, config: AsyncConfig) -> str:
    """Return in a line which side waits in the recipe's own placement."""
    if isinstance(known.apart, str):
        return f"which side waits is {known.apart}"
    step = _expected(known.apart, known.spread, config, config.max_staleness)
    name = {
        "trainer": "the trainer waits",
        "rollout": "the engines wait",
        "neither": "neither waits",
    }
    longest = max(step.trainer_idle_s, step.rollout_idle_s)
    much = "" if step.waits == "neither" else f" for {duration(longest)} of {duration(step.step_s)}"
    if not config.max_staleness:
        return (
            f"with async.max_staleness 0 the roles take turns: the trainer waits for "
            f"{duration(step.trainer_idle_s)} and the engines for {duration(step.rollout_idle_s)} of "
            f"{duration(step.step_s)}"
        )
    return f"with async.max_staleness {config.max_staleness} {name[step.waits]}{much}"


def _colocated(
    recipe: Recipe,
    shape: ModelShape,
    dims: ParallelDims,
    work: Workload,
    gpu: Hardware,
    mean_response_len: int,
) -> Expected | str:
    """Return what all ranks would do in turns, or why they could not."""
    world = dims.world + work.rollout_ranks
    together = dataclasses.replace(work, rollout_ranks=0, max_staleness=0, staged_versions=0)
    try:
        layout = ParallelDims.create(recipe.parallel, world)
    except InputError as error:
        return f"cannot run: {error}"
    if world % work.engine_tp:
        return f"cannot run: {world} ranks are not divisible into engines of {work.engine_tp}"
    if not verdict(shape, layout, together, gpu).runs:
        return f"does not fit on {world} x {gpu.name} with the recipe's other keys"
    return expected_times(shape, layout, together, gpu, mean_response_len)


def _parts_table(expected: Expected, gpu: Hardware) -> Table:
    rows = [
        (part.role, part.name, duration(part.seconds), f"{part.formula} [{part.source}]")
        for part in expected.parts
    ]
    names = (
        ("generate", "generate_s"),
        ("train", "train_s"),
        ("sync", "sync_s"),
        ("load", "load_s"),
    )
    rows += [
        ("total", name, duration(getattr(expected.times, key)), "the rows of that role")
        for name, key in names
    ]
    return Table(
        f"Seconds of either role in a step, ESTIMATED for {gpu.name} (not measured on GPUs; for other "
        "devices: --measured RUN)",
        ("role", "part", "seconds", "formula [source]"),
        rows,
    )


def _measured_rows(run: MeasuredRun) -> list[tuple[str, ...]]:
    if run.times is None:
        return [("both", "not measured", "", run.missing)]
    times, where = run.times, run.describe()
    loads = run.placement != "colocated" and not times.load_s
    generate = "generate, and load weights" if loads else "generate"
    return [
        ("rollout", generate, duration(times.generate_s), where),
        ("trainer", "train, and all that is not named here", duration(times.train_s), where),
        ("both", "sync weights", duration(times.sync_s), where),
        *([("rollout", "load weights", duration(times.load_s), where)] if times.load_s else []),
        ("both", "one step as measured", duration(run.step_s), where),
        ("rollout", f"longest response: {run.spread:.3g} x the mean one", "", where),
    ]


def _known(runs: list[MeasuredRun], absent: str) -> StepTimes | str:
    if not runs:
        return absent
    return runs[0].times or f"not measured: {runs[0].missing}"


def _spread(runs: list[MeasuredRun]) -> float:
    return runs[0].spread if runs else 1.0


def _expected(times: StepTimes, spread: float, config: AsyncConfig, bound: int) -> ExpectedStep:
    return expected_step_s(
        times,
        "asynchronous" if bound else "synchronous",
        bound,
        spread=spread,
        in_flight_updates=config.in_flight_updates,
        deterministic=config.deterministic,
    )


def _table(title: str, known: Known, config: AsyncConfig) -> Table:
    own = config.max_staleness
    if isinstance(known.colocated, str):
        rows: list[tuple[str, ...]] = [("colocated", "", "", "", "", known.colocated)]
    else:
        step = expected_step_s(known.colocated, "colocated", spread=known.colocated_spread)
        rows = [_row("colocated, on all ranks", step)]
    for bound in sorted({0, own, *BOUNDS}):
        name = f"asynchronous, bound {bound}" if bound else "synchronous"
        if isinstance(known.apart, str):
            rows.append((name, "", "", "", "", known.apart))
        else:
            rows.append(_row(name, _expected(known.apart, known.spread, config, bound)))
    return Table(title, HEADER, rows)


def _row(name: str, step: ExpectedStep) -> tuple[str, ...]:
    who = {"trainer": "trainer", "rollout": "engines", "neither": "neither"}[step.waits]
    if name.startswith("colocated"):
        who = "nobody: all devices do both"
    elif name == "synchronous":
        who = f"both, in turns; the {who} longer" if who != "neither" else "both, in turns"
    return (
        name,
        duration(step.step_s),
        f"{duration(step.trainer_idle_s)} ({step.trainer_idle:.0%})",
        f"{duration(step.rollout_idle_s)} ({step.rollout_idle:.0%})",
        duration(step.tail_s),
        who,
    )
