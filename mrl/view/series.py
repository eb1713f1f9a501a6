"""Turns metrics.jsonl into curves of bounded size.

A curve has the values of one metric, from the rows that have this metric. A value that is not a
finite number becomes None, which the page shows as a mark and a gap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.system.json_text import is_number, parse_row

MAX_POINTS = 1500
"""The largest number of points of a curve. A longer curve is thinned: it keeps the smallest and the
largest value of each stretch of steps."""
TOGETHER = (
    re.compile(r"time/engine_.+_s"),
    re.compile(r"time/.+_s"),
    re.compile(r"async/staleness/.+"),
    re.compile(r"reward/(mean|std)"),
    *(re.compile(rf"service/[^/]+/{part}") for part in ("batch_share", "tokens", "trainer_share")),
)
"""Patterns of keys whose curves the page combines: it stacks the parts of a step, and draws a band
around a mean. A key belongs to the first pattern that it matches. The curves of one pattern are thinned
at the same steps, because a stack is wrong at a step where a part is missing."""

LARGEST = 1e100
"""The largest number on the page. A larger number is drawn as this number, because the page
computes differences of values."""

Curve = dict[int, float | None]
"""The values of a metric, by the index of the row, in ascending order of the index."""


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of metrics.jsonl by ascending step, and the number of lines that are not rows.

    A row is a line with a JSON object that has an integer `step`. A line that a crash has cut short
    is not a row. If a step occurs twice, the later row counts.
    """
    objects, num_bad = read_objects(path)
    found = [row for row in map(with_step, objects) if row is not None]
    rows = {row["step"]: row for row in found}
    return [rows[step] for step in sorted(rows)], num_bad + len(objects) - len(found)


def read_objects(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects of a JSON Lines file in order, and the number of lines without an object.

    Empty lines do not count. A missing file gives ([], 0).
    """
    if not path.exists():
        return [], 0
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    found = [row for row in map(object_in, lines) if row is not None]
    return found, len(lines) - len(found)


def curves(rows: list[dict[str, Any]], max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Return the curves of all metrics in `rows`, as JSON-able data.

    `steps` are the steps of the rows. `series` has an entry for each metric key. An entry has the
    list `v` of values, and the list `at` of their indices into `steps`; `at` is left out if every
    step has a value. `thinned` says whether any curve was thinned, and `clipped` has the keys with
    values above LARGEST.

    A curve keeps at most `max_points` values. Curves whose keys match the same pattern in TOGETHER
    are thinned at the same steps: at most `max_points` steps are chosen for the pattern, and each
    curve keeps every value that it has at those steps.
    """
    found: dict[str, Curve] = {}
    clipped: set[str] = set()
    for index, row in enumerate(rows):
        for key, value in row.items():
            if key != "step" and (value is None or isinstance(value, (int, float))):
                found.setdefault(key, {})[index] = short(value, 7)
                if is_clipped(value):
                    clipped.add(key)
    groups: dict[str | re.Pattern[str], list[Curve]] = {}
    for key, curve in found.items():
        groups.setdefault(group_of(key), []).append(curve)
    kept = {group: _kept(members, max_points) for group, members in groups.items()}
    thinned = False
    series = {}
    for key, curve in sorted(found.items()):
        places = [at for at in curve if at in kept[group_of(key)]]
        thinned |= len(places) < len(curve)
        whole = len(places) == len(rows)
        series[key] = {"v": [curve[at] for at in places]} | ({} if whole else {"at": places})
    steps = [row["step"] for row in rows]
    return {"steps": steps, "series": series, "thinned": thinned, "clipped": sorted(clipped)}


def is_clipped(value: Any) -> bool:
    """Return whether `value` is finite but above LARGEST in magnitude, so that it is clipped."""
    return is_number(value) and LARGEST < abs(value) < math.inf


def notes_of(drawn: Mapping[str, Any], what: str) -> list[str]:
    """Return the page's notes about curves that were thinned or clipped.

    drawn: the result of `curves`. what: the unit of the x axis, `steps` or `rounds`.
    """
    notes = []
    if drawn["thinned"]:
        notes.append(f"Long curves are thinned; the extremes of every stretch of {what} are kept.")
    if drawn["clipped"]:
        more = f" and {len(drawn['clipped']) - 3} more" if len(drawn["clipped"]) > 3 else ""
        keys = ", ".join(drawn["clipped"][:3])
        notes.append(f"Values above {LARGEST:g} are drawn as {LARGEST:g}: {keys}{more}.")
    return notes


def group_of(key: str) -> str | re.Pattern[str]:
    """Return the first pattern of TOGETHER that the key matches; the key itself if it matches
    none."""
    return next((pattern for pattern in TOGETHER if pattern.fullmatch(key)), key)


def _kept(curves: list[Curve], max_points: int) -> set[int]:
    """Return the indices of the rows at which these curves keep their values.

    These are all rows if there are at most `max_points` rows. Otherwise each curve is thinned to an
    equal share of `max_points`, and a row is kept if any of the curves keeps its value there.
    """
    rows = set().union(*curves)
    if len(rows) <= max_points:
        return rows
    share = max_points // len(curves)
    places = [(list(curve), thin(list(curve.values()), share)) for curve in curves]
    return {at[i] for at, chosen in places for i in chosen}


def thin(values: list[float | None], max_points: int) -> list[int]:
    """Return the ascending indices of at most `max_points` values. A `max_points` below 4 counts as 4.

    The values are divided into equal stretches. Each stretch keeps its smallest value, its largest
    value and its first None, so a single spike or gap is not lost. The last value is always kept.
    """
    count = len(values)
    if count <= max_points:
        return list(range(count))
    num_stretches = max(1, (max_points - 1) // 3)
    kept = {count - 1}
    for n in range(num_stretches):
        stretch = range(count * n // num_stretches, count * (n + 1) // num_stretches)
        finite = [(value, i) for i in stretch if (value := values[i]) is not None]
        missing = [i for i in stretch if values[i] is None]
        if finite:
            kept |= {min(finite)[1], max(finite)[1]}
        kept.update(missing[:1])
    return sorted(kept)


def short(value: Any, digits: int) -> float | int | None:
    """Return a number as the page shows it; None if `value` is not a finite number.

    A float is rounded to `digits` significant digits, and becomes an int if it is then whole. An int
    is not rounded, and a bool becomes 0 or 1. Results are limited to the range -LARGEST to LARGEST.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return int(value) if isinstance(value, bool) else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if is_clipped(value):
        return math.copysign(LARGEST, value)
    if isinstance(value, int):
        return value
    rounded = float(f"{value:.{digits}g}") if abs(value) > 1 / LARGEST else 0.0
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def object_in(line: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if there is none."""
    try:
        return parse_row(line)
    except ValueError:
        return None


def with_step(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return a row with its step as an integer; None if the step is missing or not an integer."""
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not abs(step) < 2**63:
        return None
    return {**row, "step": int(step)} if step == int(step) else None
