"""Tests what `mrl check --measured` reads from the metrics of runs, and what it says is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.commands.placement_table import ALL_DEVICES, OWN_DEVICES, measured_tables, read_measured
from mrl.config import load_recipe
from mrl.config.asynchronous import AsyncConfig
from mrl.errors import InputError
from mrl.planner.placement import StepTimes

RECIPE = Path(__file__).parents[2] / "launch" / "recipes" / "toy_moe.yaml"
APART = {"rollout": {"placement": "disaggregated", "num_ranks": 1}}


def write_run(folder: Path, keys: dict[str, Any], steps: list[dict[str, float]]) -> Path:
    """Write a run folder with a recipe of these keys and the metrics of its steps."""
    tree = yaml.safe_load(RECIPE.read_text())
    for section, values in keys.items():
        tree.setdefault(section, {}).update(values)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    lines = [json.dumps({"step": number, **step}) for number, step in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def step(rollout: float, sync: float = 1.0, train: float = 4.0, **more: float) -> dict[str, float]:
    return {
        "time/step_s": rollout + sync + train,
        "time/sync_s": sync,
        "time/rollout_s": rollout,
        "time/train_s": train - 1,
        "response_len/mean": 4.0,
        "response_len/max": 12.0,
        **more,
    }


def test_means_leave_out_the_first_steps_and_evaluations(tmp_path: Path) -> None:
    slow, eval_step = step(100.0), step(50.0, **{"time/eval_s": 1.0})
    steps = [slow, slow, step(5.0), eval_step, step(6.0), step(7.0)]
    run = read_measured(write_run(tmp_path / "run", {}, steps))
    assert (run.placement, run.num_steps, run.missing) == ("colocated", 3, "")
    assert run.times == StepTimes(generate_s=6.0, train_s=4.0, sync_s=1.0)
    assert (run.step_s, run.spread) == (11.0, 3.0)


def test_the_rollout_of_a_synchronous_run_includes_the_loading(tmp_path: Path) -> None:
    run = read_measured(write_run(tmp_path / "run", APART, [step(6.0)] * 5))
    assert run.placement == "synchronous"
    assert run.times == StepTimes(generate_s=6.0, train_s=4.0, sync_s=1.0, load_s=0.0)


def test_an_asynchronous_run_does_not_say_how_long_engines_generate(tmp_path: Path) -> None:
    keys = {**APART, "async": {"max_staleness": 1}, "algorithm": {"importance": "tis"}}
    run = read_measured(write_run(tmp_path / "run", keys, [step(0.5)] * 5))
    assert (run.placement, run.max_staleness, run.times) == ("asynchronous", 1, None)
    assert "measure with async.max_staleness=0" in run.missing


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {}, [step(5.0)] * 4)
    with pytest.raises(InputError, match=r"has 2 steps without the first 2 .* expected at least 3"):
        read_measured(run)


def test_steps_without_times_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {}, [{"time/step_s": 1.0, "time/sync_s": 1.0}] * 5)
    with pytest.raises(InputError, match=r"have no time/rollout_s"):
        read_measured(run)


def test_the_table_names_the_run_that_is_missing(tmp_path: Path) -> None:
    together = write_run(tmp_path / "together", {}, [step(3.0, train=2.0)] * 5)
    (_, table), says = measured_tables([together], AsyncConfig())
    assert table.rows[0][:2] == ("colocated, on all ranks", "6 s")
    assert [row[-1] for row in table.rows[1:]] == [OWN_DEVICES] * 4
    assert "not measured: how long either role takes" in says
    apart = write_run(tmp_path / "apart", APART, [step(5.0)] * 5)
    (_, table), says = measured_tables([apart], AsyncConfig(max_staleness=1))
    assert table.rows[0] == ("colocated", "", "", "", "", ALL_DEVICES)
    assert [row[1] for row in table.rows[1:3]] == ["10 s", "5 s"]
    assert says == "with async.max_staleness 1 neither waits"
    (_, table), says = measured_tables([apart, together], None)
    assert (table.rows[0][1], table.rows[1][1], says) == ("6 s", "10 s", "")
    with pytest.raises(InputError, match="are both colocated"):
        measured_tables([together, together], None)


def test_the_line_says_who_waits_and_for_how_long(tmp_path: Path) -> None:
    keys = {**APART, "async": {"max_staleness": 1}, "algorithm": {"importance": "tis"}}
    run = write_run(tmp_path / "run", APART, [step(8.0)] * 5)
    config = load_recipe(write_run(tmp_path / "own", keys, []) / "config.yaml").asynchronous
    _, says = measured_tables([run], config)
    assert says == "with async.max_staleness 1 the trainer waits for 3 s of 8 s"
    _, says = measured_tables([run], AsyncConfig())
    assert says.endswith("the trainer waits for 8 s and the engines for 5 s of 13 s")
