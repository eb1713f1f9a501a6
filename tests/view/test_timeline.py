"""The timeline of a page: its data from an invented run folder, and what a browser makes of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import main
from mrl.run.activities import ACTIVITIES, seconds_key
from mrl.run.timeline import Timeline
from mrl.view.timeline import COLOURS, MAX_LANES, MAX_SPANS, MAX_STEPS, read_timeline
from tests.view.browser import Page, open_browser
from tests.view.invented import HOSTILE

STEP_S = 2.0


def add_steps(run: Path, num_steps: int, num_engines: int = 2) -> Timeline:
    """Step i trains for 1.5 s of 2 s; the engines generate for 1.5 s and are at the bound for 0.5 s."""
    timeline = Timeline(run / "timeline.jsonl")
    for step in range(num_steps):
        at = 1e9 + STEP_S * step
        trainer = [(at, at + 0.5, "rollout"), (at + 0.5, at + STEP_S, "train")]
        engine = [(at, at + 1.5, "generate"), (at + 1.5, at + STEP_S, "bound")]
        timeline.add(step, trainer, [engine] * num_engines)
    return timeline


def metrics(step: int) -> dict[str, float]:
    row = {"step": step, "reward/mean": 0.5, "async/queued_groups": 3.0, "async/queue_age": 1.0}
    row |= {"async/rollout_idle_share": 0.25, "async/trainer_idle_share": 0.25}
    row |= {"async/staleness/0": 1.0, "async/staleness/1": 3.0, "time/batch_wait_s": 0.5}
    row |= {"time/step_s": STEP_S, "time/rollout_s": 0.5, "time/train_s": 1.5}
    return row | {seconds_key(name): 0.0 for name in ACTIVITIES} | {"time/engine_bound_s": 0.5}


def write_run(run: Path, num_steps: int) -> list[dict[str, Any]]:
    rows = [metrics(step) for step in range(num_steps)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.yaml").write_text("rollout:\n  placement: disaggregated\n")
    return rows


def test_the_last_steps_have_a_lane_for_each_role(tmp_path: Path) -> None:
    add_steps(tmp_path, 30)
    found = read_timeline(tmp_path, [], None, "disaggregated")
    assert found["why"] == found["note"] == ""
    assert found["steps"] == [[10 + i, STEP_S * i] for i in range(MAX_STEPS)]
    assert [lane["name"] for lane in found["lanes"]] == ["trainer", "engine 0", "engine 1"]
    trainer, engine, _ = found["lanes"]
    assert [(k["text"], k["share"]) for k in trainer["kinds"]] == [
        ("trains", 0.75), ("waits for its batch", 0.25),
    ]  # fmt: skip
    assert [(k["text"], k["share"]) for k in engine["kinds"]] == [
        ("generates", 0.75), ("waits: the bound allows no more", 0.25),
    ]  # fmt: skip
    assert engine["spans"][:3] == [[0.0, 1.5, 0], [1.5, 2.0, 1], [2.0, 3.5, 0]]
    named = read_timeline(tmp_path, [], range(3, 5), "disaggregated")
    assert [step for step, _ in named["steps"]] == [3, 4]
    assert set(COLOURS) == set(ACTIVITIES)


def test_a_span_that_two_rows_share_is_one(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.add(0, [(100.0, 101.0, "train")], [[(100.0, 101.0, "generate")]])
    timeline.add(1, [(101.0, 102.0, "train")], [[(101.01, 102.0, "generate")]])
    _, engine = read_timeline(tmp_path, [], None, None)["lanes"]
    assert engine["spans"] == [[0.0, 2.0, 0]]


def test_what_is_not_drawn_is_said(tmp_path: Path) -> None:
    timeline = add_steps(tmp_path, 1, num_engines=40)
    found = read_timeline(tmp_path, [], None, "disaggregated")
    assert len(found["lanes"]) == MAX_LANES
    assert "Engines 16 to 39 are not drawn." in found["note"]
    at = 1e9 + STEP_S
    many = [
        (at + i / 10, at + (i + 1) / 10, ("load", "bound")[i % 2]) for i in range(2 * MAX_SPANS)
    ]
    timeline.add(1, [(at, at + 300.0, "train")], [many])
    found = read_timeline(tmp_path, [], range(1, 2), "disaggregated")
    assert len(found["lanes"][1]["spans"]) == MAX_SPANS
    assert "the longest are drawn" in found["note"]


@pytest.mark.parametrize(
    ("placement", "why"),
    [("colocated", "engines and trainer take turns"), ("disaggregated", "no timeline.jsonl yet")],
)
def test_a_run_without_a_timeline_says_why(tmp_path: Path, placement: str, why: str) -> None:
    assert why in read_timeline(tmp_path, [], None, placement)["why"]
    add_steps(tmp_path, 2)
    assert "it has 2 others" in read_timeline(tmp_path, [], range(7, 9), placement)["why"]


def test_staleness_is_summed_over_all_steps(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [metrics(step) for step in range(3)]
    rows[0]["async/staleness/4"] = 2.0
    rows[1] |= {"async/staleness/x": 5.0, "async/staleness/0": None, "async/staleness/": 1.0}
    assert read_timeline(tmp_path, rows, None, None)["staleness"] == [[0, 2], [1, 9], [4, 2]]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with open_browser() as page:
        yield page


def show(page: Page, run: Path) -> Path:
    main(["view", str(run)])
    page.view(1440, 900)
    page.open(run / "view.html")
    return run / "view.html"


def test_lanes_are_drawn_and_read(page: Page, tmp_path: Path) -> None:
    write_run(tmp_path, 4)
    add_steps(tmp_path, 4)
    file = show(page, tmp_path)
    assert page.count("#timeline .span") == 3 * 8
    assert "trains" in page.text("#timeline .legend")
    assert "75%" in page.text("#timeline .legend")
    width = "document.querySelectorAll('#timeline .span')[{}].getBoundingClientRect().width"
    assert page.evaluate(width.format(1)) == pytest.approx(3 * page.evaluate(width.format(0)), 0.02)
    page.hover("#timeline .span", nth=3)
    assert page.text("#timeline .readout") == "trainer, step 1: trains, 1.5 s from 2.5 s"
    page.evaluate("document.querySelector('#timeline .lanes').focus()")
    page.press("ArrowDown")
    assert page.text("#timeline .readout") == ("engine 0, step 1: generates, 1.5 s from 2 s")
    page.press("ArrowRight")
    assert page.text("#timeline .readout") == (
        "engine 0, step 1: waits: the bound allows no more, 0.5 s from 3.5 s"
    )
    assert page.text('#curves [data-keys="reward/mean"] .chart-step') == "step 1"
    assert page.count("#timeline .span.picked") == 1
    page.assert_quiet(file)


def test_waiting_has_charts_and_a_histogram(page: Page, tmp_path: Path) -> None:
    write_run(tmp_path, 4)
    add_steps(tmp_path, 4)
    file = show(page, tmp_path)
    drawn = "[...document.querySelectorAll('#{} .chart[data-keys]')].map((c) => c.dataset.keys)"
    waiting = page.evaluate(drawn.format("timeline"))
    assert "async/rollout_idle_share async/trainer_idle_share" in waiting
    assert "async/staleness/0 async/staleness/1" in waiting
    assert "time/engine_bound_s" in waiting
    seconds = [keys for keys in page.evaluate(drawn.format("curves")) if "time/train_s" in keys]
    assert seconds == ["time/rollout_s time/train_s"]  # no second is drawn twice
    assert page.text("#staleness caption") == "Staleness of 16 groups, all steps"
    assert page.text("#staleness tbody").split() == ["0", "4", "25%", "1", "12", "75%"]
    page.assert_quiet(file)


def test_names_of_a_damaged_timeline_stay_texts(page: Page, tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    rows = [
        {"step": 0, "begin": 1.0, "trainer": [[0, 1, HOSTILE[0]], [1], "x", [0, math.nan, "x"]],
         "engines": [None, [[0, "y", 1]]]},
        {"step": 1, "begin": math.inf, "trainer": [[0, 1, "train"]], "engines": []},
        {"step": 2, "begin": 2.0, "trainer": [], "engines": []},
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows) + "{\n"
    (tmp_path / "timeline.jsonl").write_text(text)
    file = show(page, tmp_path)
    assert HOSTILE[0] in page.text("#timeline .legend")
    assert page.count("#timeline .span") == 1
    assert page.count("img") == 0
    page.assert_quiet(file)


def test_a_colocated_run_says_why_it_has_none(page: Page, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    (tmp_path / "config.yaml").write_text("rollout:\n  placement: colocated\n")
    file = show(page, tmp_path)
    assert "engines and trainer take turns" in page.text("#timeline")
    assert page.count("#timeline .chart") == page.count("#staleness") == 0
    page.assert_quiet(file)


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_window_is_not_too_narrow(page: Page, tmp_path: Path, dark: bool) -> None:
    write_run(tmp_path, 30)
    add_steps(tmp_path, 30, num_engines=20)
    show(page, tmp_path)
    page.view(390, 844, dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
