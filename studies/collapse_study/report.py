"""What the collapse study found: one row for each arm and rate, the verdicts, the docs' tables, curves.

Pure functions of the results of `stability_study.runs.result_of`, each with a column `rate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from studies.collapse_study.arms import BASE, Model
from studies.collapse_study.criteria import (
    SIGNS,
    Result,
    Verdict,
    collapse_of,
    is_lower,
    of,
    smoothed,
)
from studies.stability_study.plot import Panel
from studies.stability_study.report import FIGURES, mean, round_to, shown, spread

NOT_RUN = "The study has not run yet."
COLUMNS = ("arm", "asked", "seen", "k3", "k3, engine's routes", "reward: first, best, final",
           "signs: gradient, k3, entropy", "collapsed", "below the control")  # fmt: skip


def row_of(results: Sequence[Result], arm: str, rate: float) -> dict[str, Any]:
    """Return the figures of an arm at a rate over its seeds: (median, smallest, largest) of means over
    steps. Empty figures if no run has a whole window."""
    own = of(results, arm, rate)
    curves = [curve for r in own if (curve := smoothed(r, "reward/mean"))]
    whole = [r for r in own if r["steps"]]
    figures: dict[str, list[float]] = {
        "seen": [mean(r, "paired", "routes", "disagreement") for r in whole],
        "k3": [FIGURES["native_k3"](r) for r in whole],
        "replayed_k3": [FIGURES["replayed_k3"](r) for r in whole],
        "reward_first": [curve[0] for curve in curves],
        "reward_best": [max(curve) for curve in curves],
        "reward_final": [curve[-1] for curve in curves],
        "step_s": [FIGURES["step_s"](r) for r in whole],
    }
    return {
        "arm": arm,
        "rate": rate,
        "seeds": len(own),
        "collapsed": [why for r in own if (why := collapse_of(r)) is not None],
        "signs": {name: sum(sign(r) for r in whole) for name, sign in SIGNS.items()},
        "below_control": is_lower(own, of(results, BASE, 0.0)),
        **{k: [round_to(value) for value in spread(v)] for k, v in figures.items() if v},
    }


def rows_of(results: Sequence[Result], model: Model) -> list[dict[str, Any]]:
    """Return the rows that have a run: the control, then rate after rate."""
    pairs = [(BASE, 0.0), *((arm, rate) for rate in model.rates for arm in model.arms)]
    return [row_of(results, *pair) for pair in pairs if of(results, *pair)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    if not rows:
        return NOT_RUN
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        rewards = ", ".join(
            f"{row[key][0]:.2f}" if key in row else "-"
            for key in ("reward_first", "reward_best", "reward_final")
        )
        if "reward_final" in row:
            rewards += f" ({row['reward_final'][1]:.2f} to {row['reward_final'][2]:.2f})"
        cells = (
            row["arm"],
            f"{row['rate']:.0%}",
            *(shown(row, key) if key in row else "-" for key in ("seen", "k3", "replayed_k3")),
            rewards,
            ", ".join(map(str, row["signs"].values())),
            f"{len(row['collapsed'])} of {row['seeds']}",
            "yes" if row["below_control"] else "no",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict_table(found: Mapping[str, Verdict], whole: Verdict) -> str:
    """Return the verdicts as a table in Markdown; the last row is that of the whole claim."""
    if set(found.values()) <= {"incomplete"}:
        return NOT_RUN
    lines = ["| part of the claim | verdict |", "|---|---|"]
    lines += [f"| {part} | {verdict} |" for part, verdict in found.items()]
    return "\n".join([*lines, f"| **the claim, at the largest rate** | **{whole}** |"])


def panels(model: Model) -> list[Panel]:
    """Return what is drawn: the reward at each rate, and at the largest one k3 and the gradient."""

    def at(rate: float) -> Any:
        return lambda result: result["rate"] == rate

    top = max(model.rates)
    return [
        *(Panel(f"reward, {rate:.0%}", lambda s: s["reward/mean"], shows=at(rate))
          for rate in model.rates),
        Panel(f"k3, {top:.0%}", lambda s: s["mismatch/k3"], log=True, shows=at(top)),
        Panel(f"gradient norm, {top:.0%}", lambda s: s["grad_norm"], log=True, shows=at(top)),
    ]  # fmt: skip


def line_of(result: Result) -> str:
    """Return a run in a line."""
    curve = smoothed(result, "reward/mean") or [float("nan")]
    why = collapse_of(result)
    seen = mean(result, "paired", "routes", "disagreement") if result["steps"] else float("nan")
    return (
        f"{result['arm']:8} {result['rate']:.0%} seed {result['seed']}: reward {curve[0]:.2f} to "
        f"{curve[-1]:.2f} (best {max(curve):.2f}), {seen:.1%} of the choices differ, "
        f"{result['seconds']:.0f} s, {why or result['ended']}"
    )
