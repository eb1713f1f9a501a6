import json
import math
import random

import pytest

from mrl.view.series import MAX_POINTS, curves, read_rows, short, thin


def test_rows_are_read_as_far_as_they_are_rows(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1, "a": 2}', "", '{"step": 0, "a": 1}', "[1]", '{"a": 1}', '{"step": 1.5}']
    lines += ['{"step": NaN}', '{"step": 1, "a": 3}', '{"step": 2, "a"']
    file.write_text("\n".join(lines))
    rows, num_bad = read_rows(file)
    assert rows == [{"step": 0, "a": 1}, {"step": 1, "a": 3}]
    assert num_bad == 5
    assert read_rows(tmp_path / "nothing") == ([], 0)


def test_a_curve_holds_the_rows_that_have_its_key():
    rows = [{"step": 3, "a": 1.0}, {"step": 4, "a": None, "b": 2}, {"step": 9, "a": math.inf}]
    drawn = curves([*rows, {"step": 10, "a": 5.0, "text": "x"}])
    assert drawn["steps"] == [3, 4, 9, 10]
    assert drawn["series"] == {"a": {"v": [1, None, None, 5]}, "b": {"v": [2], "at": [1]}}
    assert not drawn["thinned"]
    assert curves([])["steps"] == []


@pytest.mark.parametrize("spike", [0, 1, 4321, 9998, 9999])
def test_a_thinned_curve_keeps_extremes_gaps_and_the_last_value(spike):
    values = [math.sin(i / 50) for i in range(10000)]
    values[spike] = 100.0
    holed = [None if i == (spike + 37) % 10000 else v for i, v in enumerate(values)]
    kept = thin(holed, 300)
    assert len(kept) <= 300
    assert kept == sorted(set(kept))
    assert {spike, (spike + 37) % 10000, 9999} <= set(kept)


def test_thinning_says_so_and_keeps_the_places():
    drawn = curves([{"step": 2 * i, "a": float(i % 7)} for i in range(100)], max_points=10)
    series = drawn["series"]["a"]
    assert drawn["thinned"]
    assert len(series["at"]) == len(series["v"]) <= 10
    assert all(value == place % 7 for place, value in zip(series["at"], series["v"], strict=True))
    assert len(drawn["steps"]) == 100


def test_what_the_page_adds_up_is_thinned_at_the_same_steps():
    draw = random.Random(1).random
    parts = [f"time/{name}_s" for name in ("rollout", "sync", "train", "logprob", "score")]
    rows = [
        {"step": i, "lr": draw(), "reward/mean": draw(), "reward/std": draw()}
        | {key: draw() for key in parts}
        | ({"time/eval_s": draw()} if i % 20 == 0 else {})
        for i in range(5000)
    ]
    for n, key in enumerate([*parts, "reward/mean", "reward/std"]):
        rows[777 + n][key] = 50.0  # a spike of each, at a step of its own
    drawn = curves(rows)
    assert drawn["thinned"]
    series = drawn["series"]
    for members in (parts, ["reward/mean", "reward/std"]):
        at = series[members[0]]["at"]
        assert MAX_POINTS / 4 < len(at) <= MAX_POINTS
        assert all(series[key]["at"] == at for key in members)
        assert all(50 in series[key]["v"] for key in members)
    shared = set(series[parts[0]]["at"])
    assert series["time/eval_s"]["at"] == [i for i in range(0, 5000, 20) if i in shared]
    assert series["lr"]["at"] != series["reward/mean"]["at"]  # alone, so with more steps
    for key, curve in series.items():
        kept = zip(curve["at"], curve["v"], strict=True)
        assert all(value == short(rows[i][key], 7) for i, value in kept)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1 / 3, 0.333), (1234.5, 1230), (1e-12, 1e-12), (7, 7), (12345, 12345), (True, 1), (1e300, 1e100),
     (-10**20, -10**20), (-10**200, -1e100), (5e-324, 0),
     (math.nan, None), (-math.inf, None), (None, None), ("1", None)],
)  # fmt: skip
def test_short(value, expected):
    assert short(value, 3) == expected
    assert json.loads(json.dumps(short(value, 3), allow_nan=False)) == expected
