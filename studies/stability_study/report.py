"""What the stability study found: one row an arm, what was expected and seen, and the docs' table.

All figures of a run are means over its steps, those of an arm the median of its runs with the smallest
and the largest. Pure functions of the results of `runs.result_of`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

WINDOW = 3
"""Steps that a smoothed reward is the mean of."""
Result = dict[str, Any]
Spread = tuple[float, float, float]
"""Median, smallest, largest."""


def smoothed(result: Result) -> list[float]:
    """Means of WINDOW consecutive rewards."""
    rewards = [step["reward/mean"] for step in result["steps"]]
    return [statistics.fmean(rewards[i : i + WINDOW]) for i in range(len(rewards) - WINDOW + 1)]


def has_collapsed(result: Result) -> bool:
    """Tell whether a number was not finite, or the reward ended below half of its best (both smoothed).

    The rule was fixed before the study was run. Entropy does not count: the task has one right answer.
    """
    if result["ended"] != "done":
        return True
    curve = smoothed(result)
    return curve[-1] < max(curve) / 2


def largest_fall(result: Result) -> float:
    """Return the largest fall of the smoothed reward from its best so far, as a share of that."""
    best, fall = 0.0, 0.0
    for value in smoothed(result):
        best = max(best, value)
        fall = max(fall, 1 - value / best if best else 0.0)
    return fall


def mean(result: Result, *keys: str) -> float:
    """Return the mean over steps of `step[key][key]...`."""

    def at(step: Any) -> float:
        for key in keys:
            step = step[key]
        return float(step)

    return statistics.fmean(at(step) for step in result["steps"])


def most(result: Result, key: str) -> float:
    return max(step[key] for step in result["steps"])


FIGURES: dict[str, Callable[[Result], float]] = {
    "k3": lambda r: mean(r, "mismatch/k3"),
    "abs_mean": lambda r: mean(r, "mismatch/logprob_abs_mean"),
    "mismatch_extreme": lambda r: mean(r, "study/mismatch_extreme"),
    "ratio_extreme": lambda r: mean(r, "study/ratio_extreme"),
    "ratio_max": lambda r: most(r, "ratio/max"),
    "clip_frac": lambda r: mean(r, "ratio/clip_frac"),
    "native_k3": lambda r: mean(r, "paired", "native", "k3"),
    "replayed_k3": lambda r: mean(r, "paired", "replayed", "k3"),
    "disagreement": lambda r: mean(r, "paired", "routes", "disagreement"),
    "token_any_layer": lambda r: mean(r, "paired", "routes", "token_any_layer"),
    "native_extreme": lambda r: (
        mean(r, "paired", "native", "num_extreme") / mean(r, "paired", "native", "num_tokens")
    ),
    "reward_mean": lambda r: mean(r, "reward/mean"),
    "reward_first": lambda r: smoothed(r)[0],
    "reward_best": lambda r: max(smoothed(r)),
    "reward_final": lambda r: smoothed(r)[-1],
    "largest_fall": largest_fall,
    "entropy_final": lambda r: r["steps"][-1]["entropy"],
    "step_s": lambda r: statistics.median(step["time/step_s"] for step in r["steps"]),
}
"""The figures of one run."""


def spread(values: Sequence[float]) -> Spread:
    return statistics.median(values), min(values), max(values)


def row_of(arm: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return an arm's figures over its seeds. A run without enough steps for a curve counts as
    collapsed.
    """
    long_enough = [r for r in results if len(r["steps"]) >= WINDOW]
    return {
        "arm": arm,
        "seeds": len(results),
        "collapsed": sum(r not in long_enough or has_collapsed(r) for r in results),
        **{
            name: [round_to(value) for value in spread([figure(r) for r in long_enough])]
            for name, figure in FIGURES.items()
            if long_enough
        },
    }


def round_to(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def pooled(results: Sequence[Result], way: str) -> tuple[int, int]:
    """Count (extreme tokens, all tokens) of all rollouts, under `native` or `replayed` routes."""
    parts = [step["paired"][way] for result in results for step in result["steps"]]
    return sum(p["num_extreme"] for p in parts), sum(p["num_tokens"] for p in parts)


def checks(results: Sequence[Result], num_wanted: int) -> dict[str, bool]:
    """What must hold, whatever the paper says."""
    by = {(r["arm"], r["seed"]): r for r in results}
    seeds = sorted({seed for _, seed in by})
    pairs = [(by["R3", s], by["off", s]) for s in seeds if ("R3", s) in by and ("off", s) in by]
    figure = FIGURES["k3"]
    return {
        f"all {num_wanted} runs were made": len(results) == num_wanted,
        "the same rollouts, over each run: replay lowers k3": bool(results)
        and all(mean(r, "paired", "replayed", "k3") < mean(r, "paired", "native", "k3")
                for r in results if r["steps"]),
        "R3 against off, in every seed: lower k3": bool(pairs)
        and all(figure(r3) < figure(off) for r3, off in pairs),
        "all rollouts: replay leaves fewer extreme tokens, or none were there":
            pooled(results, "replayed")[0] < max(1, pooled(results, "native")[0]),
    }  # fmt: skip


def expectations(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return ratios of with replay to without: what arXiv 2510.11370 reports and what was seen. No
    checks.
    """
    every = [r for r in results if r["steps"]]
    first = [{**r, "steps": r["steps"][:1]} for r in every]
    (native, tokens), (replayed, _) = pooled(every, "native"), pooled(every, "replayed")
    found = [
        (
            "k3, the same rollouts, first step",
            0.5,
            _ratio(first, "replayed_k3", first, "native_k3"),
        ),
        ("k3, the same rollouts, all steps", 0.5, _ratio(every, "replayed_k3", every, "native_k3")),
        (
            f"extreme tokens, the same rollouts ({replayed} and {native} of {tokens})",
            0.1,
            replayed / native if native else math.nan,
        ),
    ]
    r3, off = ([r for r in every if r["arm"] == arm] for arm in ("R3", "off"))
    if r3 and off:
        found += [
            ("k3, runs of R3 and of off", 0.5, _ratio(r3, "k3", off, "k3")),
            (
                "extreme tokens against the engine, runs of R3 and of off",
                0.1,
                _ratio(r3, "mismatch_extreme", off, "mismatch_extreme"),
            ),
            (
                "extreme tokens of the update, runs of R3 and of off",
                None,
                _ratio(r3, "ratio_extreme", off, "ratio_extreme"),
            ),
        ]
    return [
        {
            "figure": name,
            "paper_at_most": paper,
            "seen": None if math.isnan(ratio) else round_to(ratio, 3),
            "holds": None if paper is None or math.isnan(ratio) else ratio <= paper,
        }
        for name, paper, ratio in found
    ]


def _ratio(over: Sequence[Result], a: str, under: Sequence[Result], b: str) -> float:
    """Return the ratio of two figures' means over runs; NaN where there is nothing to divide by."""
    below = statistics.fmean(map(FIGURES[b], under))
    return statistics.fmean(map(FIGURES[a], over)) / below if below else math.nan


SPREADS = {
    "k3": "k3",
    "abs_mean": "mean \\|d\\|",
    "mismatch_extreme": "extreme, engine",
    "ratio_extreme": "extreme, update",
    "ratio_max": "largest ratio",
    "clip_frac": "clipped",
}
"""Columns of a median with its range, and their headings."""
COLUMNS = ("arm", *SPREADS.values(), "reward: first, best, final", "largest fall", "collapsed")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        cells = [row["arm"], *(shown(row, key) for key in SPREADS)]
        rewards = ", ".join(
            f"{row[key][0]:.2f}" for key in ("reward_first", "reward_best", "reward_final")
        )
        final = row["reward_final"]
        cells += [f"{rewards} ({final[1]:.2f} to {final[2]:.2f})", shown(row, "largest_fall")]
        lines.append("| " + " | ".join([*cells, f"{row['collapsed']} of {row['seeds']}"]) + " |")
    return "\n".join(lines)


def shown(row: dict[str, Any], key: str) -> str:
    middle, low, high = (f"{value:.2g}" for value in row[key])
    return f"{middle} ({low} to {high})"


def expectation_table(found: Sequence[dict[str, Any]]) -> str:
    lines = ["| ratio, with replay to without | the paper | seen | |", "|---|---|---|---|"]
    for one in found:
        paper = "" if one["paper_at_most"] is None else f"{one['paper_at_most']:g}"
        seen = "nothing to divide by" if one["seen"] is None else f"{one['seen']:g}"
        holds = {None: "", True: "at most that", False: "more than that"}[one["holds"]]
        lines.append(f"| {one['figure']} | {paper} | {seen} | {holds} |")
    return "\n".join(lines)
