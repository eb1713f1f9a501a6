"""This module reads the seconds of a step's parts from the metrics of runs, for `mrl check --measured`.

Only what a run measured is given. What it cannot have measured is named, with the run that would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mrl.errors import InputError
from mrl.preflight.placement import Placement, StepTimes
from mrl.run.folder import RunFolder
from mrl.run.source import load_run

SKIPPED, FEWEST = 2, 3
"""Steps at the start that are left out, as engines and kernels are made ready in them; steps that must
be left."""
STEP, SYNC, ROLLOUT, EVAL = "time/step_s", "time/sync_s", "time/rollout_s", "time/eval_s"
MEAN_LEN, MAX_LEN = "response_len/mean", "response_len/max"


@dataclass(frozen=True)
class MeasuredRun:
    """A `MeasuredRun` holds the means of a run's steps."""

    folder: Path
    placement: Placement
    max_staleness: int
    num_steps: int
    """Steps that the means are of."""
    step_s: float
    times: StepTimes | None
    """None where `missing` says what was not measured."""
    missing: str
    spread: float
    """The longest response over the mean one, mean over steps: at most what `spread` of
    `mrl.preflight.placement` can be."""

    def describe(self) -> str:
        """Return what the run is, for a row of a table."""
        bound = f", bound {self.max_staleness}" if self.max_staleness else ""
        return f"{self.folder} ({self.placement}{bound}), mean of {self.num_steps} steps"


def read_measured(folder: Path) -> MeasuredRun:
    """Return the means of a run's steps without the first ones, and those with an evaluation, in which
    engines do something else. Raises InputError where the folder holds no run, or too few steps."""
    recipe = load_run(folder)
    rows = [row for row in RunFolder(folder).read_metrics()[SKIPPED:] if EVAL not in row]
    if len(rows) < FEWEST:
        raise InputError(
            f"--measured: {folder} has {len(rows)} steps beside the first {SKIPPED} and those with an "
            f"evaluation, expected at least {FEWEST}; let it run longer"
        )
    config = recipe.asynchronous
    placement: Placement = "colocated"
    if recipe.rollout.placement == "disaggregated":
        placement = "asynchronous" if config.max_staleness else "synchronous"
    means = _means(rows)
    times, missing = _times(folder, means, placement)
    shortest = means.get(MEAN_LEN, 0.0)
    return MeasuredRun(
        folder,
        placement,
        config.max_staleness if placement == "asynchronous" else 0,
        len(rows),
        means[STEP],
        times,
        missing,
        max(1.0, means[MAX_LEN] / shortest) if shortest > 0 else 1.0,
    )


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each metric that all steps have."""
    keys = set.intersection(*(set(row) for row in rows))
    numbers = {key: [row[key] for row in rows] for key in keys}
    return {
        key: fmean(values)
        for key, values in numbers.items()
        if all(isinstance(value, int | float) for value in values)
    }


def _times(
    folder: Path, means: Mapping[str, float], placement: Placement
) -> tuple[StepTimes | None, str]:
    """Return a run's times, or what it did not measure. Engines of a disaggregated run load weights
    while the trainer waits for the rollout, so that `generate_s` includes it."""
    if absent := [key for key in (STEP, SYNC, ROLLOUT) if key not in means]:
        raise InputError(f"--measured: the steps of {folder} have no {absent[0]}; give another run")
    train_s = max(0.0, means[STEP] - means[SYNC] - means[ROLLOUT])
    if placement == "asynchronous":
        return None, (
            f"the roles of {folder} work at one time, and only runs whose roles take turns are read; "
            "measure with async.max_staleness=0"
        )
    return StepTimes(means[ROLLOUT], train_s, means[SYNC]), ""
