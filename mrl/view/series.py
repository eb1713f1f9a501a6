"""Turns metrics.jsonl into curves of bounded size.

A row may lack keys that other rows have: a curve holds the rows that have its key. A value that is not
a finite number is None: the page marks it, and leaves a gap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.system.json_text import is_number, parse_row

MAX_POINTS = 1500
"""The number of points of one curve. A longer one keeps the smallest and the largest value of each
stretch of steps."""
TOGETHER = (
    re.compile(r"time/engine_.+_s"),
    re.compile(r"time/.+_s"),
    re.compile(r"async/staleness/.+"),
    re.compile(r"reward/(mean|std)"),
    *(re.compile(rf"service/[^/]+/{part}") for part in ("batch_share", "tokens", "trainer_share")),
)
"""Keys that the page adds up: parts of a step, and a mean with its band. Those of one pattern, the
first that fits, are thinned at the same steps, as a sum at a step where a part is left out is wrong."""

LARGEST = 1e100
"""The largest number on the page; larger ones are drawn as this, because the page computes with
differences of values."""

Curve = dict[int, float | None]
"""The values by the index of their row, ascending."""


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return (rows by ascending step, number of lines that are no row).

    Of a step that is there twice, the later line counts. A line cut short by a crash, or anything else
    that is not an object with a whole `step`, is counted and left out.
    """
    objects, num_bad = read_objects(path)
    found = [row for row in map(_row, objects) if row is not None]
    rows = {row["step"]: row for row in found}
    return [rows[step] for step in sorted(rows)], num_bad + len(objects) - len(found)


def read_objects(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return (the objects of a JSON Lines file in their order, number of lines that are none)."""
    if not path.exists():
        return [], 0
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    found = [row for row in map(_object, lines) if row is not None]
    return found, len(lines) - len(found)


def curves(rows: list[dict[str, Any]], max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Return {"steps": [...], "series": {key: {"v": values, "at": indices into steps}}, "thinned":
    bool, "clipped": keys with values above LARGEST}.

    `at` is left out where a curve has a value at every step. Curves of keys in TOGETHER have at most
    `max_points` steps among them, and each has its values at all of these where it has any.
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
        groups.setdefault(_group(key), []).append(curve)
    kept = {group: _kept(members, max_points) for group, members in groups.items()}
    thinned = False
    series = {}
    for key, curve in sorted(found.items()):
        places = [at for at in curve if at in kept[_group(key)]]
        thinned |= len(places) < len(curve)
        whole = len(places) == len(rows)
        series[key] = {"v": [curve[at] for at in places]} | ({} if whole else {"at": places})
    steps = [row["step"] for row in rows]
    return {"steps": steps, "series": series, "thinned": thinned, "clipped": sorted(clipped)}


def is_clipped(value: Any) -> bool:
    """Whether a finite number is drawn as LARGEST."""
    return is_number(value) and LARGEST < abs(value) < math.inf


def notes_of(drawn: Mapping[str, Any], what: str) -> list[str]:
    """Return the page's notes on curves: which were thinned, and which clipped. `what` is the unit of
    the x axis: steps or rounds."""
    notes = []
    if drawn["thinned"]:
        notes.append(f"Long curves are thinned; the extremes of every stretch of {what} are kept.")
    if drawn["clipped"]:
        more = f" and {len(drawn['clipped']) - 3} more" if len(drawn["clipped"]) > 3 else ""
        keys = ", ".join(drawn["clipped"][:3])
        notes.append(f"Values above {LARGEST:g} are drawn as {LARGEST:g}: {keys}{more}.")
    return notes


def _group(key: str) -> str | re.Pattern[str]:
    """Return the pattern of TOGETHER that the key matches, otherwise the key."""
    return next((pattern for pattern in TOGETHER if pattern.fullmatch(key)), key)


def _kept(curves: list[Curve], max_points: int) -> set[int]:
    """Return the rows that these curves keep: all, or those where one has an extreme of a stretch."""
    rows = set().union(*curves)
    if len(rows) <= max_points:
        return rows
    share = max_points // len(curves)
    places = [(list(curve), thin(list(curve.values()), share)) for curve in curves]
    return {at[i] for at, chosen in places for i in chosen}


def thin(values: list[float | None], max_points: int) -> list[int]:
    """Return the indices of at most `max_points` values: of each stretch its extremes and one None.

    A spike of one step stays, and so does a step that was not finite; the last value stays.
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
    """Return `value` with this many significant digits, at most LARGEST; None if it is not a finite
    number."""
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


def _object(line: str) -> dict[str, Any] | None:
    try:
        return parse_row(line)
    except ValueError:
        return None


def _row(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return a row with its step as an integer; None where it has no step."""
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not abs(step) < 2**63:
        return None
    return {**row, "step": int(step)} if step == int(step) else None
