"""The tables of `mrl check --plan` that compare colocated and disaggregated placement.

They show the time of a step, and whether the trainer waits for the engines or the reverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.config import Recipe
from mrl.config.asynchronous import AsyncConfig
from mrl.errors import InputError
from mrl.planner.expected_times import Expected, expected_times
from mrl.planner.hardware import Hardware
from mrl.planner.measured_times import MeasuredRun, mean_times
from mrl.planner.placement import ExpectedStep, StepTimes, expected_step_s
from mrl.planner.report import Table
from mrl.planner.shape import ModelShape
from mrl.planner.units import duration
from mrl.planner.verdict import verdict
from mrl.planner.workload import Workload
from mrl.run.folder import RunFolder
from mrl.run.source import load_run
from parallel.dims import ParallelDims

BOUNDS = (1, 2, 4)
HEADER = ("placement", "one step", "trainer waits", "engines wait", "tail", "who waits")
TAIL = "tail: engines are not full, because the step or new weights wait for slow groups"
ALL_DEVICES = (
    "not measured: how long training and generating take on all devices; give a colocated run of the "
    "recipe as well (--measured RUN RUN)"
)
OWN_DEVICES = (
    "not measured: how long either role takes on ranks of its own; give a run with "
    "rollout.placement=disaggregated and async.max_staleness=0 (--measured RUN RUN)"
)


@dataclass(frozen=True)
class Known:
    """The times of a step in each placement, or the reason why the times are not known."""

    colocated: StepTimes | str
    disaggregated: StepTimes | str
    spread: float
    """In the disaggregated placement: how many times longer the generation of a step's batch takes than
    it would if the engines were always full (see `mrl.planner.placement.expected_step_s`)."""
    colocated_spread: float = 1.0


def planned_tables(
    recipe: Recipe,
    shape: ModelShape,
    dims: ParallelDims,
    work: Workload,
    gpu: Hardware,
    mean_response_len: int | None,
) -> tuple[list[Table], str]:
    """Return tables with the estimated times of a disaggregated recipe, and a line about waiting.

    The line says whether the trainer or the engines wait for the other side (`which_side_waits`).
    `mean_response_len` is in tokens; if it is None, every response is assumed to have the longest
    length allowed. Raises InputError if the mean is below 1 or above that length.
    """
    longest = work.response_len
    mean = longest if mean_response_len is None else mean_response_len
    if not 1 <= mean <= longest:
        raise InputError(
            f"--response-len: got {mean}, expected 1 to rollout.max_response_len, which is {longest}"
        )
    disaggregated = expected_times(shape, dims, work, gpu, mean)
    colocated = _colocated(recipe, shape, dims, work, gpu, mean)
    known = Known(
        colocated if isinstance(colocated, str) else colocated.times,
        disaggregated.times,
        disaggregated.spread,
        1.0 if isinstance(colocated, str) else colocated.spread,
    )
    title = (
        f"One step by placement, ESTIMATED for {gpu.name}, responses of {mean} tokens on average and "
        f"{longest} at most ({TAIL})"
    )
    tables = [_parts_table(disaggregated, gpu), _table(title, known, recipe.asynchronous)]
    return tables, which_side_waits(known, recipe.asynchronous)


def measured_tables(folders: Sequence[Path], config: AsyncConfig | None) -> tuple[list[Table], str]:
    """Return tables with the times of measured runs, and a line about waiting.

    The line says whether the trainer or the engines wait for the other side (`which_side_waits`).
    For a colocated recipe, `config` is None and the line is empty. Raises InputError if two
    runs have the same placement; at most one colocated and one disaggregated run are expected.
    """
    runs = [read_measured(folder) for folder in folders]
    colocated = [run for run in runs if run.placement == "colocated"]
    disaggregated = [run for run in runs if run.placement != "colocated"]
    for kind, found in (("colocated", colocated), ("disaggregated", disaggregated)):
        if len(found) > 1:
            raise InputError(
                f"--measured: {found[0].folder} and {found[1].folder} are both {kind}; give one "
                "colocated run, one disaggregated run, or one of each"
            )
    known = Known(
        _known(colocated, ALL_DEVICES),
        _known(disaggregated, OWN_DEVICES),
        _spread(disaggregated),
        _spread(colocated),
    )
    rows = [row for run in runs for row in _measured_rows(run)]
    title = (
        f"One step by placement, from measured times ({TAIL}; its size assumes that engines decode few "
        "requests as fast as many)"
    )
    tables = [
        Table("Seconds of a step's parts", ("role", "part", "seconds", "source"), rows),
        _table(title, known, config or AsyncConfig()),
    ]
    return tables, which_side_waits(known, config) if config is not None else ""


def read_measured(folder: Path) -> MeasuredRun:
    """Return the mean times of the run in `folder`.

    Raises InputError if the folder holds no run, or if `mean_times` cannot use the run's metrics.
    """
    return mean_times(folder, load_run(folder), RunFolder(folder).read_metrics())


def which_side_waits(known: Known, config: AsyncConfig) -> str:
    """Say in one line whether the trainer or the engines wait in a disaggregated run, and how long.

    The staleness bound is `config.max_staleness`. If the times of the disaggregated placement are not
    known, the line gives the reason.
    """
    if isinstance(known.disaggregated, str):
        return f"which side waits is {known.disaggregated}"
    step = _expected(known.disaggregated, known.spread, config, config.max_staleness)
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
    """Estimate the recipe's times if all ranks were used for a colocated run.

    If the recipe cannot run colocated, return the reason instead.
    """
    world = dims.world + work.rollout_ranks
    colocated = dataclasses.replace(
        work, rollout_ranks=0, max_staleness=0, staged_versions=0, full_sync_every=1
    )
    try:
        layout = ParallelDims.create(recipe.parallel, world)
    except InputError as error:
        return f"cannot run: {error}"
    if world % work.engine_tp:
        return f"cannot run: {world} ranks are not divisible into engines of {work.engine_tp}"
    if not verdict(shape, layout, colocated, gpu).runs:
        return f"does not fit on {world} x {gpu.name} with the recipe's other keys"
    return expected_times(shape, layout, colocated, gpu, mean_response_len)


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
        f"Seconds of each role in a step, ESTIMATED for {gpu.name} (not measured on GPUs; for other "
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
        ("trainer", "train, and everything not listed here", duration(times.train_s), where),
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
        if isinstance(known.disaggregated, str):
            rows.append((name, "", "", "", "", known.disaggregated))
        else:
            rows.append(_row(name, _expected(known.disaggregated, known.spread, config, bound)))
    return Table(title, HEADER, rows)


def _row(name: str, step: ExpectedStep) -> tuple[str, ...]:
    who = {"trainer": "trainer", "rollout": "engines", "neither": "neither"}[step.waits]
    if name.startswith("colocated"):
        who = "neither: all devices do both"
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
