"""This module writes what docs/placement.md says of a result: tables, and where which arm wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from studies.placement_study.arms import KINDS
from studies.placement_study.report import BALANCED, Row, best_asynchronous

NOT_RUN = "The whole study has not been made yet. `make placement` makes it, and writes this part."
NAMES = {
    "colocated": "colocated", "synchronous": "synchronous server", "bound_1": "asynchronous, bound 1",
    "bound_2": "asynchronous, bound 2", "bound_4": "asynchronous, bound 4",
}  # fmt: skip
SPEED = ("arm", "steps/s", "samples/s", "to synchronous", "predicted", "to colocated",
         "trainer idle", "rollout idle", "busy cores")  # fmt: skip
REWARD = ("arm", "reward at the end", "mean staleness", "samples to the target",
          "seconds to the target")  # fmt: skip


def page_part(result: Mapping[str, Any] | None) -> str:
    """Return what stands between the markers of the page; `result` is placement.json, if there is
    one."""
    if result is None:
        return NOT_RUN
    rows: Sequence[Row] = result["rows"]
    parts = [verdicts(rows)]
    for kind, about in KINDS.items():
        own = [row for row in rows if row["kind"] == kind]
        if own:
            parts += [f"### {_capital(about.tells)}", _parts(own), _speed(own), _reward(own)]
    parts.append("![reward of each arm against time and against samples](placement.svg)")
    return "\n\n".join(part for part in parts if part)


def verdicts(rows: Sequence[Row]) -> str:
    """Return one line for each task: what the best bound gains, and where colocation stands."""
    lines = []
    for kind, about in KINDS.items():
        by = {row["arm"]: row for row in rows if row["kind"] == kind}
        best = best_asynchronous(list(by.values()), kind)
        if best is None or best["to_synchronous"] is None:
            continue
        goal = " (goal: 1.4)" if kind == BALANCED else ""
        text = (
            f"- **{_capital(about.tells)}.** The fastest asynchronous arm ({NAMES[best['arm']]}) "
            f"makes {shown(best['to_synchronous'])} times the steps per second of the synchronous "
            f"server{goal}."
        )
        if "colocated" in by and best["to_colocated"] and by["colocated"]["to_synchronous"]:
            over = by["colocated"]["to_synchronous"]
            text += (
                f" Colocation {_won(over)} against the synchronous server ({shown(over)} times its "
                f"steps) and {_won([1 / value for value in best['to_colocated']])} against the fastest "
                f"asynchronous arm (which makes {shown(best['to_colocated'])} times as many)."
            )
        lines.append(text)
    return "\n".join(lines)


def _won(ratio: Sequence[float]) -> str:
    """Say how a ratio over seeds ended; a draw where seeds disagree."""
    if min(ratio) > 1:
        return "wins"
    return "loses" if max(ratio) < 1 else "is within the noise"


def _parts(rows: Sequence[Row]) -> str:
    for row in rows:
        if row["arm"] == "synchronous":
            seconds = {name: f"{value[0]:.2f} s" for name, value in row["parts"].items()}
            return (
                f"A step of the synchronous server takes {seconds['generate_s']} to generate, "
                f"{seconds['load_s']} to load weights, {seconds['train_s']} to train and "
                f"{seconds['sync_s']} to send weights. The longest answer of its slowest group is "
                f"{row['spread'][0]:.2f} times that of the mean group."
            )
    return ""


def _speed(rows: Sequence[Row]) -> str:
    return _table(SPEED, [
        [NAMES[row["arm"]], shown(row["steps_per_s"]), f"{row['samples_per_s'][0]:.0f}",
         shown(row["to_synchronous"]), shown(row["predicted_to_synchronous"], whole=False),
         shown(row["to_colocated"]), _share(row, "trainer_idle"), _share(row, "rollout_idle"),
         " + ".join(f"{each[0]:.2f}" for each in row["busy_cores"])]
        for row in rows
    ])  # fmt: skip


def _reward(rows: Sequence[Row]) -> str:
    target = f"The target is a reward of {rows[0]['reward_target']:.3f}, which every run reached."
    return target + "\n\n" + _table(REWARD, [
        [NAMES[row["arm"]], shown(row["reward_end"]), f"{row['staleness_mean'][0]:.2f}",
         f"{row['samples_to_target'][0]:.0f}", shown(row["seconds_to_target"])]
        for row in rows
    ])  # fmt: skip


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(values: Sequence[float] | None, *, whole: bool = True) -> str:
    """Return a median with its range, or without."""
    if values is None:
        return ""
    middle, low, high = (f"{value:.2f}" if value < 100 else f"{value:.0f}" for value in values)
    return f"{middle} ({low} to {high})" if whole else middle


def _share(row: Row, name: str) -> str:
    return f"{row[name][0]:.0%}" if name in row else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
