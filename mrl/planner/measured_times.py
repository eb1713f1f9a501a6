"""Read the seconds of a step's parts from the metrics of a run, for `mrl check --measured`.

Some runs cannot measure these times. Then `MeasuredRun.missing` says why, and names the kind of run
that can measure them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mrl.config import Recipe
from mrl.errors import InputError
from mrl.planner.placement import Placement, StepTimes

NUM_SKIPPED, MIN_STEPS = 2, 3
"""Number of initial steps that are skipped because engines and kernels are set up in them, and the
smallest number of steps that must remain."""
STEP, SYNC, ROLLOUT, EVAL = "time/step_s", "time/sync_s", "time/rollout_s", "time/eval_s"
MEAN_LEN, MAX_LEN = "response_len/mean", "response_len/max"


@dataclass(frozen=True)
class MeasuredRun:
    """The mean times of a run's steps."""

    folder: Path
    placement: Placement
    max_staleness: int
    num_steps: int
    """Number of steps over which the means are taken."""
    step_s: float
    times: StepTimes | None
    """The mean times. None if the run could not measure them; `missing` says why."""
    missing: str
    spread: float
    """Length of the longest response of a step divided by the mean length, averaged over steps. The
    value is an upper bound of `spread` in `mrl.planner.placement.expected_step_s`."""

    def describe(self) -> str:
        """Return a description of the run for a row of a table."""
        bound = f", bound {self.max_staleness}" if self.max_staleness else ""
        return f"{self.folder} ({self.placement}{bound}), mean of {self.num_steps} steps"


def mean_times(folder: Path, recipe: Recipe, metrics: Sequence[Mapping[str, Any]]) -> MeasuredRun:
    """Return the mean times of the run in `folder`, from its recipe and the rows of metrics.jsonl.

    The first steps are left out, and so are steps with an evaluation, during which the engines also
    generate for the eval sets. Raises InputError if too few steps remain or a time is missing.
    """
    rows = [row for row in metrics[NUM_SKIPPED:] if EVAL not in row]
    if len(rows) < MIN_STEPS:
        raise InputError(
            f"--measured: {folder} has {len(rows)} steps without the first {NUM_SKIPPED} and those "
            f"with an evaluation, expected at least {MIN_STEPS}; let it run longer"
        )
    config = recipe.asynchronous
    placement: Placement = "colocated"
    if recipe.rollout.placement == "disaggregated":
        placement = "asynchronous" if config.max_staleness else "synchronous"
    means = _means(rows)
    times, missing = _times(folder, means, placement)
    mean_len = means.get(MEAN_LEN, 0.0)
    return MeasuredRun(
        folder,
        placement,
        config.max_staleness if placement == "asynchronous" else 0,
        len(rows),
        means[STEP],
        times,
        missing,
        max(1.0, means[MAX_LEN] / mean_len) if mean_len > 0 else 1.0,
    )


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each metric that is a number in all rows."""
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
    """Return (times, empty string), or (None, reason) if the run cannot measure its times.

    Only an asynchronous run cannot measure its times. In a synchronous disaggregated run the
    engines load weights while the trainer waits for the rollout. The time of this loading cannot be
    separated, so `generate_s` includes it and `load_s` is 0.
    """
    if absent := [key for key in (STEP, SYNC, ROLLOUT) if key not in means]:
        raise InputError(f"--measured: the steps of {folder} have no {absent[0]}; give another run")
    train_s = max(0.0, means[STEP] - means[SYNC] - means[ROLLOUT])
    if placement == "asynchronous":
        return None, (
            f"trainer and engines of {folder} work at the same time, so their times cannot be told "
            "apart; measure with async.max_staleness=0"
        )
    return StepTimes(means[ROLLOUT], train_s, means[SYNC]), ""
