"""`make placement`: figures of made-up runs, the page, and the study in short with real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import RESULTS, between_markers
from mrl.config import load_recipe
from mrl.preflight.asynchronous import check_asynchronous
from mrl.preflight.roles import roles_of
from studies import placement
from studies.placement_study import pinned
from studies.placement_study.arms import ARMS, BOUNDS, KINDS, NUM_SEEDS, Run, runs_of
from studies.placement_study.figures import answer_lengths, figures, spread, steps_to
from studies.placement_study.report import checks, curves_of, expected, rows_of
from studies.placement_study.tables import NOT_RUN, page_part

STEP_S = {"colocated": 1.6, "synchronous": 2.0, "bound_1": 1.25, "bound_2": 1.0, "bound_4": 1.1}


def metric_rows(num: int, step_s: float, *, wait_s: float | None = None) -> list[dict[str, Any]]:
    """Metrics of steps that take `step_s`, but for the first, which takes 10 s."""
    rows, now = [], 1000.0
    for step in range(num):
        took = 10.0 if step == 0 else step_s
        now += took
        row = {"step": step, "time/timestamp": now, "time/step_s": took, "tokens/rollout": 64.0,
               "reward/mean": step / num, "staleness/mean": 0.5, "staleness/max": 1.0}  # fmt: skip
        if wait_s is not None:
            row |= {"time/batch_wait_s": wait_s, "time/sync_s": 0.1}
            engine = {"generate": wait_s - 0.2, "load": 0.2, "bound": step_s - wait_s}
            engine |= {"weights": 0.0, "score": 0.0}
            row |= {f"time/engine_{name}_s": value for name, value in engine.items()}
        rows.append(row)
    return rows


def made_up(kind: str, arm: str, seed: int, **more: Any) -> dict[str, Any]:
    """A run of 8 steps; another seed was twice as slow in all arms."""
    step_s = STEP_S[arm] * (1 + seed)
    apart = None if arm == "colocated" else 0.55 * step_s
    bound = BOUNDS.get(arm, 0)
    found = figures(metric_rows(8, step_s, wait_s=apart), 2, 16)
    identity = {"kind": kind, "arm": arm, "seed": seed, "spread": 1.0, "wall_s": 30.0}
    return {**identity, **found, "busy_cores": [0.9, 0.8], "staleness_max": bound, **more}


def whole_study() -> list[dict[str, Any]]:
    return [
        made_up(kind, arm, seed) for seed in (0, 1) for kind in KINDS for arm in KINDS[kind].arms
    ]


def test_a_rank_keeps_to_its_cores() -> None:
    assert pinned.cores_of(0, ["3", "0,1"]) == {3}
    assert pinned.cores_of(1, ["3", "0,1"]) == {0, 1}
    with pytest.raises(ValueError, match=r"cores for 1 rank\(s\), expected some for rank 1"):
        pinned.cores_of(1, ["0"])
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, sys; from studies.placement_study import pinned\n"
        "os.execv = lambda program, words: print(os.sched_getaffinity(0), words[2:])\n"
        "pinned.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "99999", str(core), "--", "train", "recipe.yaml"],
        env={**os.environ, "LOCAL_RANK": "1"}, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[0] == f"{{{core}}} ['mrl', 'train', 'recipe.yaml']"


def test_the_first_steps_count_for_no_timing() -> None:
    found = figures(metric_rows(8, 2.0, wait_s=1.1), 2, 16)
    assert found["steps_per_s"] == pytest.approx(0.5)
    assert found["samples_per_s"] == pytest.approx(8.0)
    assert found["tokens_per_s"] == pytest.approx(32.0)
    assert found["trainer_idle"] == pytest.approx(1.1 / 2)
    assert found["rollout_idle"] == pytest.approx(0.9 / 2)
    assert found["reward_end"] == pytest.approx((3 + 4 + 5 + 6 + 7) / 8 / 5)
    assert found["curve"]["seconds"][:3] == [10.0, 12.0, 14.0]
    parts = found["parts"]
    assert parts == pytest.approx({"generate_s": 0.9, "load_s": 0.2, "train_s": 0.8, "sync_s": 0.1})
    assert sum(parts.values()) == pytest.approx(2.0)
    rows = [
        {key: value for key, value in row.items() if not key.startswith("time/engine")}
        for row in metric_rows(8, 2.0, wait_s=1.1)
    ]
    unknown = figures(rows, 2, 16)
    assert "rollout_idle" not in unknown
    assert unknown["parts"]["generate_s"] == pytest.approx(1.1)
    colocated = figures(metric_rows(8, 2.0), 2, 16)
    assert "trainer_idle" not in colocated
    assert "parts" not in colocated


def test_the_spread_is_of_the_longest_answers_of_groups() -> None:
    lines = [("a", 3), ("a", 10), ("b", 2), ("b", 1), ("c", 6)]
    lengths = answer_lengths([{"prompt_id": p, "response_len": n} for p, n in lines])
    assert lengths == [10, 2, 6]
    assert spread([lengths, [4, 4]]) == pytest.approx((10 / 6 + 1) / 2)


def test_a_target_is_reached_by_the_smoothed_reward() -> None:
    rewards = [0.0, 0.0, 0.9, 0.3, 0.3, 0.6]
    assert steps_to(rewards, 0.35) == 4
    assert steps_to(rewards, 0.9) is None


def test_ratios_are_taken_within_a_seed() -> None:
    rows = {(row["kind"], row["arm"]): row for row in rows_of(whole_study())}
    assert len(rows) == sum(len(kind.arms) for kind in KINDS.values())
    # The second seed was twice as slow, which no ratio shows.
    assert rows["short", "bound_2"]["to_synchronous"] == [2.0, 2.0, 2.0]
    assert rows["short", "bound_2"]["to_colocated"] == [1.6, 1.6, 1.6]
    assert rows["short", "bound_2"]["steps_per_s"] == [0.75, 0.5, 1.0]
    assert rows["demo", "bound_2"]["to_colocated"] is None
    assert rows["short", "colocated"]["samples_to_target"][0] == 16 * 8


def test_the_plan_predicts_from_the_parts_of_the_synchronous_server() -> None:
    parts = {"generate_s": 1.0, "load_s": 0.1, "train_s": 0.8, "sync_s": 0.1}
    result = {"parts": parts, "spread": 2.0}
    assert expected(result, "synchronous") == pytest.approx(2.0)
    assert expected(result, "colocated") == pytest.approx(0.5 + 0.4 + 0.2)
    assert expected(result, "bound_1") == pytest.approx(1.1)
    assert expected(result, "bound_2") == pytest.approx(0.9)


def test_what_must_hold() -> None:
    results = whole_study()
    assert all(checks(results, len(results)).values())
    assert not all(checks(results[1:], len(results)).values())
    old = [*results[:-1], {**results[-1], "staleness_max": 3}]
    assert [text for text, holds in checks(old, len(results)).items() if not holds] == [
        "no token is older than its bound"
    ]
    slow = [made_up("short", arm, 0) for arm in ("colocated", "synchronous")]
    slow.append({**made_up("short", "synchronous", 0), "arm": "bound_1"})
    assert list(checks(slow, 3).values()) == [True, True, True, False]
    apart = {"generate_s": 2.0, "load_s": 0.0, "train_s": 0.4, "sync_s": 0.1}
    uneven = checks([made_up("short", "synchronous", 0, parts=apart)], 1)
    assert list(uneven.values()) == [True, True, False]


def test_the_page_says_where_colocation_wins_and_loses() -> None:
    text = page_part({"rows": rows_of(whole_study())})
    short = next(line for line in text.splitlines() if line.startswith("- **Short answers"))
    assert "(asynchronous, bound 2) makes 2.00 (2.00 to 2.00) times" in short
    assert "wins against the synchronous server (1.25 (1.25 to 1.25) times its steps)" in short
    assert "loses against the fastest asynchronous arm" in short
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(tables) == 2 * (len(rows_of(whole_study())) + 2 * len(KINDS))
    assert "nan" not in text


def test_the_plot_has_a_line_for_each_arm_in_each_panel() -> None:
    results = whole_study()
    drawn = placement.draw({"curves": curves_of(results), "rows": rows_of(results)})
    assert drawn.count("<polyline") == 2 * sum(len(kind.arms) for kind in KINDS.values())
    assert "nan" not in drawn


def test_the_page_shows_the_result_on_file() -> None:
    file = RESULTS / "placement.json"
    result = json.loads(file.read_text()) if file.exists() else None
    page = placement.PAGE.read_text()
    assert between_markers(page, placement.MARKER, page_part(result)) == page
    if result is None:
        assert NOT_RUN in page
        assert not placement.PLOT.exists()
    else:
        assert placement.PLOT.read_text() == placement.draw(result)
        assert f"]({placement.PLOT.name})" in page


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arm", ARMS)
def test_mrl_takes_the_recipe_of_every_arm(kind: str, arm: str, tmp_path: Path) -> None:
    run = Run(kind, arm, 7, 12, 2)
    keys = run.keys(tmp_path / "start", tmp_path / "out")
    recipe = load_recipe(ROOT / "launch/recipes" / KINDS[kind].recipe, keys)
    check_asynchronous(recipe)
    assert roles_of(recipe, 2).num_rollout == (0 if arm == "colocated" else 1)
    assert recipe.asynchronous.max_staleness == BOUNDS.get(arm, 0)
    assert (recipe.seed, recipe.train.num_steps, recipe.sft) == (7, 12, None)


def test_arms_run_beside_each_other_and_a_study_goes_on(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    wanted = runs_of(["short", "demo"], list(ARMS), NUM_SEEDS, None, 5)
    assert [run.name for run in wanted[:6]] == [
        *(f"short_{arm}_0" for arm in ARMS), "demo_synchronous_0"
    ]  # fmt: skip
    assert [run.seed for run in wanted] == sorted(run.seed for run in wanted)
    made: list[str] = []

    def train(run: Run, start: Path, folder: Path) -> dict[str, Any]:
        made.append(run.name)
        if run.name == "short_bound_1_0":
            raise placement.Unexpected("it ended with code 1")
        return made_up(run.kind, run.arm, run.seed)

    monkeypatch.setattr(placement, "train", train)
    monkeypatch.setattr(placement, "ensure_start", lambda work, kind: None)
    assert len(placement.run_all(wanted[:3], tmp_path, None)) == 2
    assert "FAILED short_bound_1_0: it ended with code 1" in capsys.readouterr().out
    assert placement.run_all(wanted[:5], tmp_path, 0.0) == placement.run_all(
        wanted[:2], tmp_path, 0
    )
    assert len(made) == 3
    placement.run_all(wanted[:4], tmp_path, None)
    assert made[3:] == ["short_bound_1_0", "short_bound_2_0"]


def test_a_folder_of_another_study_is_refused(tmp_path: Path, monkeypatch) -> None:
    placement.open_work(tmp_path, fresh=False)
    placement.open_work(tmp_path, fresh=False)
    monkeypatch.setattr(placement, "settings", lambda: {"arms": "others"})
    with pytest.raises(SystemExit, match="holds a study of other settings"):
        placement.open_work(tmp_path, fresh=False)
    placement.open_work(tmp_path, fresh=True)


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_the_study_in_short(tmp_path: Path) -> None:
    arms = ["colocated", "synchronous", "bound_1"]
    command = [sys.executable, "-m", "studies.placement", "--short", "--kinds", "short"]
    done = subprocess.run(
        [*command, "--arms", *arms, "--work", str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert "FAILED short_" not in done.stdout, done.stdout
    result = json.loads((tmp_path / "placement.json").read_text())
    assert [row["arm"] for row in result["rows"]] == arms
    assert result["verdicts"]["all 3 runs were made"]
    assert result["verdicts"]["no token is older than its bound"]
    for row in result["rows"]:
        assert row["steps_per_s"][0] > 0
        # Two ranks on two cores: what a rank keeps busy is at most a core, unless it shares both.
        assert all(
            0.05 < each[0] < (2 if row["arm"] == "colocated" else 1.05)
            for each in row["busy_cores"]
        )
    pages = placement.pages("placement", result)
    assert pages[placement.PLOT].count("<polyline") == 2 * len(arms)
    assert NOT_RUN not in pages[placement.PAGE]
