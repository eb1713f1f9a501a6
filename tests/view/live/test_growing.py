"""Curves to which rows are added."""

from __future__ import annotations

import math
import random
from typing import Any

from mrl.view.live.growing import BATCH, TAIL, GrowingCurves, drawn_values
from mrl.view.series import curves
from tests.view.invented import metrics

STRANGE: dict[str, Any] = {
    "step": 7, "nan": math.nan, "inf": -math.inf, "none": None, "text": "x", "list": [1], "yes": True,
    "big": -1e200, "whole": 12345678, "__proto__": 0.123456789,
}  # fmt: skip


def grown(rows: list[dict[str, Any]], max_points: int = 1500) -> GrowingCurves:
    found = GrowingCurves(max_points)
    for row in rows:
        found.add(row)
    return found


def test_short_runs_have_the_curves_of_the_page_as_a_file() -> None:
    rows = [metrics(step) for step in range(20)] + [STRANGE | {"step": 20}]
    whole = curves(rows)
    assert grown(rows).data() == whole | {"clipped": ["big"]}
    values = drawn_values(STRANGE)
    assert set(values) == STRANGE.keys() - {"step", "text", "list"}
    assert values["nan"] is values["inf"] is values["none"] is None


def test_long_runs_keep_the_extremes_and_the_newest_values() -> None:
    generator, rows = random.Random(0), []
    for step in range(20_000):
        value = generator.gauss(0, 1)
        row = {"step": step, "a": value, "reward/mean": value, "reward/std": 1.0}
        rows.append(row | ({"rare": step} if step % 100 == 0 else {}))
    rows[5_000]["a"], rows[12_345]["a"], rows[9_000]["a"] = 50.0, -50.0, None
    found = grown(rows, 300)
    data = found.data()
    series = data["series"]["a"]
    points = {data["steps"][at]: v for at, v in zip(series["at"], series["v"], strict=True)}
    assert (points[5_000], points[12_345], points[9_000]) == (50, -50, None)
    assert all(step in points for step in range(20_000 - BATCH, 20_000))
    assert len(points) <= 300 + 3 * TAIL
    assert data["thinned"]
    assert data["series"]["rare"]["v"] == list(range(0, 20_000, 100))
    # The band needs the mean and its width at the same steps.
    assert data["series"]["reward/mean"]["at"] == data["series"]["reward/std"]["at"]
    halves = [sum(step < 10_000 for step in points), sum(step >= 10_000 for step in points)]
    assert halves[0] > 60  # the beginning is not worn away
