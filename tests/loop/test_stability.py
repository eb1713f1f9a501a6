"""`make stability` in short: a bfloat16 engine against a float32 trainer, with and without replay."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.result import between_markers
from mrl.toy_model import write_toy_model
from studies.stability import line_of
from studies.stability_study.arms import ARMS, Job
from studies.stability_study.jobs import read_lines
from studies.stability_study.plot import PANELS, svg
from studies.stability_study.report import (
    checks,
    expectation_table,
    expectations,
    has_collapsed,
    largest_fall,
    row_of,
    table,
)
from tests.ranks import run_ranks

NUM_STEPS = 3
SMALL = (
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_len=24",
    "rollout.canary_prompts=2",
    "train.num_steps_per_rollout=2",
)


def two_runs(folder: Path) -> list[dict[str, Any]]:
    """One engine, one seed."""
    from parallel import prepare
    from studies.stability_study.runs import make_run, result_of, start_engine

    prepare()
    job = Job("off", 0, NUM_STEPS, str(folder / "model"), str(folder / "run"), SMALL)
    engine, mesh = start_engine(job)
    results = []
    try:
        for arm in ("off", "R3"):
            more = (*SMALL, *ARMS[arm])
            mine = dataclasses.replace(job, arm=arm, folder=str(folder / arm), more=more)
            run = make_run(mine, mesh)
            run.begin(engine)
            results.append(result_of(run, mine))
            run.close()  # as the study's worker does: the engine serves another run then
    finally:
        engine.stop()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("stability")
    write_toy_model(folder / "model", num_experts=64)
    return run_ranks(1, two_runs, folder, folder=folder / "out")[0]


@pytest.mark.release
@pytest.mark.timeout(300)
def test_replay_narrows_the_gap_to_a_bfloat16_engine(results: list[dict[str, Any]]) -> None:
    off, r3 = results
    for step in (*off["steps"], *r3["steps"]):
        ways = step["paired"]
        # Not zero: the engine really computes in another precision than the trainer.
        assert 1e-3 < ways["replayed"]["abs_mean"] < ways["native"]["abs_mean"] < 0.1
        assert ways["replayed"]["k3"] < ways["native"]["k3"]
        assert 0 < ways["routes"]["disagreement"] < 0.1
        assert ways["native"]["num_tokens"] > 100
    # Each arm trains on what it says: off scores natively, R3 along the routes (in mini-batches).
    for result, way in ((off, "native"), (r3, "replayed")):
        for step in result["steps"]:
            assert step["mismatch/k3"] == pytest.approx(step["paired"][way]["k3"], rel=1e-3)
    found = checks(results, 2)
    assert all(found.values()), found
    assert not checks(results[:1], 2)["all 2 runs were made"]


@pytest.mark.release
def test_the_report_of_it(results: list[dict[str, Any]]) -> None:
    rows = [row_of(result["arm"], [result]) for result in results]
    text = table(rows)
    assert [line.split(" | ")[0] for line in text.splitlines()[2:]] == ["| off", "| R3"]
    assert all(line.count(" | ") == 9 for line in text.splitlines()[2:])
    expected = expectations(results)
    assert expected[0]["seen"] < 1
    assert len(expectation_table(expected).splitlines()) == 2 + len(expected)
    drawn = svg(results)
    assert drawn.count("<polyline") == len(PANELS) * 2
    assert "nan" not in drawn
    assert line_of(results[1]).startswith("R3       seed 0: reward ")


def made_up(rewards: list[float], ended: str = "done") -> dict[str, Any]:
    return {"arm": "off", "seed": 0, "ended": ended, "steps": [{"reward/mean": r} for r in rewards]}


def test_what_a_collapse_is() -> None:
    assert not has_collapsed(made_up([0.2, 0.4, 0.6, 0.8, 0.8, 0.8]))
    dip = made_up([0.8, 0.8, 0.8, 0.2, 0.2, 0.2, 0.7, 0.7, 0.7])
    assert not has_collapsed(dip)  # it came back
    assert largest_fall(dip) == pytest.approx(0.75)
    assert has_collapsed(made_up([0.2, 0.8, 0.8, 0.8, 0.3, 0.3, 0.3]))
    assert has_collapsed(made_up([0.5, 0.5, 0.5], ended="not finite: a gradient"))
    assert row_of("off", [made_up([0.5], ended="not finite")])["collapsed"] == 1


def test_a_study_goes_on_after_a_line_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert read_lines(file) == []
    file.write_text(json.dumps(made_up([0.5])) + '\n{"arm": "R3", "se')
    assert [line["arm"] for line in read_lines(file)] == ["off"]


def test_arms_are_the_issues() -> None:
    assert list(ARMS) == ["off", "TIS", "R2", "R3", "GSPO", "R3+GSPO"]


def test_the_table_goes_between_its_markers() -> None:
    document = "before\n<!-- arms -->\nold\n<!-- /arms -->\nafter\n"
    assert between_markers(document, "arms", "new") == document.replace("old", "new")
    with pytest.raises(ValueError, match="arms"):
        between_markers("no markers", "arms", "new")
