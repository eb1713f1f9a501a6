"""This module turns the results of all runs into rows, checks and the tables of docs/placement.md.

Every ratio is taken within one seed, whose arms ran one after the other; a cell is the median over
seeds with the smallest and the largest. Pure functions of what `runs.train` returns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.planner.placement import StepTimes, expected_step_s
from studies.placement_study.arms import ARMS, BOUNDS, KINDS
from studies.placement_study.figures import smoothed, steps_to

GOAL = 1.4
"""What the best asynchronous arm should reach on the balanced task, over the synchronous server."""
BALANCED = "short"
"""The task in which generation and training take about equal time."""
EQUAL = 1.5
"""The slower of two sides that take about equal time takes at most so many times as long."""
FIGURES = (
    "steps_per_s", "samples_per_s", "tokens_per_s", "trainer_idle", "rollout_idle", "reward_end",
    "staleness_mean", "wall_s",
)  # fmt: skip
Result = dict[str, Any]
Row = Mapping[str, Any]
Key = tuple[str, str, int]
"""Task, arm and seed."""
Spread = tuple[float, float, float]
"""Median, smallest, largest."""


def median(values: Sequence[float]) -> Spread:
    return statistics.median(values), min(values), max(values)


def rounded(values: Sequence[float], digits: int = 4) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]


def expected(result: Result, arm: str) -> float:
    """Return the seconds that the plan's formula expects of a step of `arm`, given the parts of a step
    of the synchronous server.

    In a colocated run both cores do either part, each half of the work.
    """
    times = StepTimes(**result["parts"])
    if arm == "colocated":
        return expected_step_s(times.scaled(generate=2, train=2), "colocated").step_s
    if arm == "synchronous":
        return expected_step_s(times, "synchronous").step_s
    return expected_step_s(times, "asynchronous", BOUNDS[arm], spread=result["spread"]).step_s


def targets(results: Sequence[Result]) -> dict[str, float]:
    """Return for each task the reward that each of its runs reached: the lowest best smoothed one."""
    best: dict[str, list[float]] = {}
    for result in results:
        best.setdefault(result["kind"], []).append(max(smoothed(result["curve"]["reward"])))
    return {kind: min(values) for kind, values in best.items()}


def rows_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one row for each arm of each task that was run."""
    target = targets(results)
    by = {(r["kind"], r["arm"], r["seed"]): r for r in results}
    rows = []
    for kind in KINDS:
        for arm in ARMS:
            if own := [r for r in results if (r["kind"], r["arm"]) == (kind, arm)]:
                rows.append(_row(own, by, target[kind]))
    return rows


def _row(own: Sequence[Result], by: dict[Key, Result], target: float) -> dict[str, Any]:
    kind, arm = own[0]["kind"], own[0]["arm"]

    def ratios(other: str, value: Callable[[Result, Result], float]) -> list[float] | None:
        pairs = [(r, by[kind, other, r["seed"]]) for r in own if (kind, other, r["seed"]) in by]
        return rounded(median([value(r, o) for r, o in pairs])) if pairs else None

    def speed(mine: Result, other: Result) -> float:
        return mine["steps_per_s"] / other["steps_per_s"]

    def predicted(_: Result, synchronous: Result) -> float:
        return expected(synchronous, "synchronous") / expected(synchronous, arm)

    row: dict[str, Any] = {"kind": kind, "arm": arm, "seeds": len(own)}
    row |= {name: rounded(median([r[name] for r in own])) for name in FIGURES if name in own[0]}
    row["busy_cores"] = [
        rounded(median(list(each)), 3) for each in zip(*(r["busy_cores"] for r in own), strict=True)
    ]
    row["to_synchronous"] = ratios("synchronous", speed)
    row["to_colocated"] = ratios("colocated", speed)
    row["predicted_to_synchronous"] = ratios("synchronous", predicted)
    row["staleness_max"] = max(r["staleness_max"] for r in own)
    row["reward_target"] = round(target, 4)
    row |= _to_target(own, target)
    if arm == "synchronous":
        row["parts"] = {
            name: rounded(median([r["parts"][name] for r in own])) for name in own[0]["parts"]
        }
        row["spread"] = rounded(median([r["spread"] for r in own]))
    return row


def _to_target(own: Sequence[Result], target: float) -> dict[str, Any]:
    """Return after how many samples and seconds the reward was reached."""
    num_samples = [r["samples_per_s"] / r["steps_per_s"] for r in own]
    steps = [
        steps_to(r["curve"]["reward"], target - 1e-9) or len(r["curve"]["reward"]) for r in own
    ]
    seconds = [r["curve"]["seconds"][n - 1] for r, n in zip(own, steps, strict=True)]
    return {
        "samples_to_target": rounded(
            median([n * each for n, each in zip(steps, num_samples, strict=True)])
        ),
        "seconds_to_target": rounded(median(seconds)),
    }


def curves_of(results: Sequence[Result]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return by task and arm the medians over seeds of seconds and reward after each step."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for kind in KINDS:
        for arm in ARMS:
            own = [r["curve"] for r in results if (r["kind"], r["arm"]) == (kind, arm)]
            if own:
                found.setdefault(kind, {})[arm] = {
                    name: _middle([curve[name] for curve in own]) for name in ("seconds", "reward")
                }
    return found


def _middle(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the median curve of several."""
    return rounded([statistics.median(values) for values in zip(*curves, strict=True)])


def balance(results: Sequence[Result]) -> float | None:
    """Return generation over training, in seconds of a step of the balanced task; None without one."""
    own = [r for r in results if (r["kind"], r["arm"]) == (BALANCED, "synchronous")]
    if not own:
        return None
    parts = [r["parts"] for r in own]
    return statistics.median(
        (p["generate_s"] + p["load_s"]) / (p["train_s"] + p["sync_s"]) for p in parts
    )


def best_asynchronous(rows: Sequence[Row], kind: str) -> Row | None:
    """Return the row of the bound with the most steps per second of a task."""
    own = [row for row in rows if row["kind"] == kind and row["arm"].startswith("bound")]
    return max(own, key=lambda row: row["steps_per_s"][0], default=None)


def checks(results: Sequence[Result], num_wanted: int) -> dict[str, bool]:
    """Return what must hold."""
    found = {
        f"all {num_wanted} runs were made": len(results) == num_wanted,
        "no token is older than its bound": bool(results)
        and all(r["staleness_max"] <= BOUNDS.get(r["arm"], 0) for r in results),
    }
    best, share = best_asynchronous(rows_of(results), BALANCED), balance(results)
    if share is not None:
        found[f"{BALANCED}: generation and training take about equal time"] = (
            1 / EQUAL <= share <= EQUAL
        )
    if best is not None and best["to_synchronous"] is not None:
        what = f"at least {GOAL} times the steps per second of the synchronous server"
        found[f"{BALANCED}: an asynchronous arm makes {what}"] = best["to_synchronous"][0] >= GOAL
    return found
