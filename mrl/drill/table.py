"""Provoke the faults of a drill one after the other, and yield a table row for each fault."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from mrl.config import Recipe
from mrl.drill import hung, rollout_ranks, running, stopped
from mrl.drill.chain import NUM_STEPS, Drill, one_step_again, problems_of_end
from mrl.drill.faults import FAULTS, NOT_PROVOKED, Fault, Row
from mrl.drill.job import Unexpected
from mrl.errors import ExitCode, InputError

FAULT_MODULES = (running, hung, rollout_ranks, stopped)
"""The modules that define the faults. Importing them adds the faults to FAULTS."""
HEADER = ("fault", "seconds", "verdict", "exit", "what happened")


def drill(
    recipe: Recipe, ranks: int, folder: Path, names: Sequence[str], num_steps: int = NUM_STEPS
) -> Iterator[Row]:
    """Train a run without faults for `num_steps` steps, then provoke the faults `names`; yield rows.

    The first row is for the run without faults. If that run has problems, no fault is provoked.
    There is one more row per fault. Outside of `folder`, only temporary files are written. Raises
    InputError if the folder is not empty.
    """
    faults = [FAULTS[name] for name in names]
    whole = Drill(recipe, ranks, folder, num_steps)
    try:
        first = _without_fault(whole)
        yield first
        if not first.passed:
            return
        for each in faults:
            if why := each.why_not(recipe):
                yield Row(each.name, each.did, why, 0.0, "not provoked")
            else:
                yield _tried(each, whole)
    finally:
        whole.end()


def not_provoked() -> Iterator[Row]:
    """Yield a row for each fault that a drill never provokes."""
    for name, why in NOT_PROVOKED.items():
        yield Row(name, "", why, 0.0, "not provoked")


def table_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of a table with the columns of HEADER, one tuple per row."""
    return [
        (
            row.fault,
            f"{row.seconds:.1f}" if row.verdict != "not provoked" else "",
            row.verdict if row.passed else "FAILED",
            "" if row.exit_code is None else str(row.exit_code),
            row.happened if row.passed else "; ".join((*row.problems, row.happened)),
        )
        for row in rows
    ]


def _without_fault(whole: Drill) -> Row:
    did = f"{whole.num_steps} steps without a fault, and the first of them again"
    began = time.monotonic()
    try:
        job = whole.train_without_fault()
        seconds = time.monotonic() - began
        problems = problems_of_end(job, job.end(), (ExitCode.DONE,))
        if "memory leak" in job.printed():
            problems.append(f"a warning of a memory leak in {job.log}")
        job.kill()
        text = one_step_again(whole) or "done; the same bits in both"
    except Unexpected as error:
        return Row("none", did, "", time.monotonic() - began, "recovered", None, (str(error),))
    return Row("none", did, text, seconds, "recovered", ExitCode.DONE, tuple(problems))


def _tried(each: Fault, whole: Drill) -> Row:
    """Provoke a fault, and return its `Row`. If the row has not passed, the next fault gets a new
    run."""
    began = time.monotonic()
    try:
        row = each.provoke(whole)
    except (Unexpected, InputError, OSError, psutil.Error) as error:
        code = None
        if whole.job is not None:
            with suppress(Unexpected):
                code = whole.job.process.poll()
        seconds = time.monotonic() - began
        row = Row(each.name, each.did, "", seconds, "recovered", code, (str(error),))
    if not row.passed:
        whole.broken(each.name)
    return row
