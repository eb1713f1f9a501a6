"""What counts as a collapse, what decides the claim, and what refutes it: fixed before the study ran.

docs/collapse.md says the same in words. Everything is a pure function of the results of
`stability_study.runs.result_of`, each with a column `rate`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from studies.collapse_study.arms import BASE

Result = dict[str, Any]
WINDOW = 5
"""Steps that a smoothed value is the mean of."""
BELOW_BEST = 0.5
"""A run has collapsed if its reward ends below this share of its best."""
BELOW_START = 0.05
"""A run has collapsed if its reward ends lower than it began by more than this."""
GRADIENT_SIGN, K3_SIGN, ENTROPY_SIGN = 10.0, 10.0, 2.0
"""How many times its value at the start a number must reach to be a sign of trouble."""
DECIDES = 4
"""With five seeds, this difference between two counts of collapses has p = 0.024 at most (Fisher's
exact test, one-sided)."""
EXCUSES = 1
"""A difference of two counts that is at most this refutes that they differ."""
Verdict = Literal["supported", "refuted", "undecided", "nothing to prevent", "incomplete"]


def smoothed(result: Result, key: str) -> list[float]:
    """Means of WINDOW consecutive values of a metric; empty if the run was shorter."""
    values = [step[key] for step in result["steps"]]
    return [statistics.fmean(values[i : i + WINDOW]) for i in range(len(values) - WINDOW + 1)]


def collapse_of(result: Result) -> str | None:
    """Return why the run has collapsed, or None: a number was not finite, or the smoothed reward ended
    below half of its best, or lower than its first value by more than 0.05.

    Raises ValueError for a run that was too short to tell.
    """
    if result["ended"] != "done":
        return "not finite"
    curve = smoothed(result, "reward/mean")
    if not curve:
        raise ValueError(f"got {len(result['steps'])} steps, expected at least {WINDOW}")
    if curve[-1] < BELOW_BEST * max(curve):
        return "below half of its best"
    if curve[-1] < curve[0] - BELOW_START:
        return "below its start"
    return None


def growth(result: Result, key: str) -> float:
    """Return the largest smoothed value of a metric as a multiple of the first; 1 for a short run."""
    curve = smoothed(result, key)
    return max(curve) / max(curve[0], 1e-12) if curve else 1.0


def gradient_spike(result: Result) -> float:
    """Return the largest gradient norm as a multiple of the median of the first WINDOW steps; 1 for a
    run without a step."""
    norms = [step["grad_norm"] for step in result["steps"]]
    return max(norms) / max(statistics.median(norms[:WINDOW]), 1e-12) if norms else 1.0


SIGNS: dict[str, Callable[[Result], bool]] = {
    "gradient": lambda r: gradient_spike(r) >= GRADIENT_SIGN,
    "k3": lambda r: growth(r, "mismatch/k3") >= K3_SIGN,
    "entropy": lambda r: growth(r, "entropy") >= ENTROPY_SIGN,
}
"""Signs of trouble by name. They are counted, and decide nothing."""


def of(results: Sequence[Result], arm: str, rate: float) -> list[Result]:
    """Return the runs of an arm at a rate."""
    return [r for r in results if (r["arm"], r["rate"]) == (arm, rate)]


def count(results: Sequence[Result], arm: str, rate: float) -> int:
    """Count the collapses of an arm at a rate."""
    return sum(collapse_of(r) is not None for r in of(results, arm, rate))


def is_lower(low: Sequence[Result], high: Sequence[Result]) -> bool:
    """Tell whether every run of `low` ends with a lower smoothed reward than every run of `high`. For
    five runs each, p = 1/252 (Mann and Whitney's U, one-sided)."""
    ends = [
        [curve[-1] for r in runs if (curve := smoothed(r, "reward/mean"))] for runs in (low, high)
    ]
    return all(ends) and max(ends[0]) < min(ends[1])


def differ(more: int, fewer: int) -> Verdict:
    """Judge two counts of collapses out of five runs each: are there `more` than `fewer`?"""
    if more - fewer >= DECIDES:
        return "supported"
    return "refuted" if more - fewer <= EXCUSES else "undecided"


def verdicts(
    results: Sequence[Result], arms: Sequence[str], rates: Sequence[float], num_seeds: int
) -> dict[str, Verdict]:
    """Judge the parts of the claim.

    For each rate: GRPO collapses and the control does not; and, if so, each other arm does not. A
    part whose runs are not all there is incomplete.
    """
    found: dict[str, Verdict] = {}
    keys = [(BASE, 0.0), *((arm, rate) for arm in (BASE, *arms) for rate in rates)]
    whole = {key: len(of(results, *key)) == num_seeds for key in keys}
    for rate in rates:
        at = f"at {100 * rate:g}%"
        name = f"{at} {BASE} collapses, and without a disturbance it does not"
        if not (whole[BASE, 0.0] and whole[BASE, rate]):
            found[name] = "incomplete"
            continue
        collapses = count(results, BASE, rate)
        found[name] = differ(collapses, count(results, BASE, 0.0))
        for arm in arms:
            if arm == BASE:
                continue
            name = f"{at} {arm} prevents it"
            if not whole[arm, rate]:
                found[name] = "incomplete"
            elif (
                found[f"{at} {BASE} collapses, and without a disturbance it does not"]
                != "supported"
            ):
                found[name] = "nothing to prevent"
            else:
                found[name] = differ(collapses, count(results, arm, rate))
    return found


def claim(found: Mapping[str, Verdict], largest: float) -> Verdict:
    """Judge the whole claim at the largest rate: GRPO collapses, R3 prevents it, GSPO prevents it."""
    at = f"at {100 * largest:g}%"
    parts = [
        found[f"{at} {BASE} collapses, and without a disturbance it does not"],
        *(found.get(f"{at} {arm} prevents it", "nothing to prevent") for arm in ("R3", "GSPO")),
    ]
    for verdict in ("incomplete", "refuted", "undecided"):
        if verdict in parts:
            return verdict
    return "supported"
