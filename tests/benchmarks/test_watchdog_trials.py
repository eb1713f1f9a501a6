"""`make watchdog`: how a trial hangs a rank, and how its outcome is judged."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.watchdog import LIMITS, chosen, faults_of, faults_of_calm, keys_of, overrides
from benchmarks.watched_rank import KINDS, PLACES, Trial, _Hang
from mrl.algorithms.logprob_pass import update_can_serve
from mrl.config import load_recipe

GOOD: dict[str, Any] = {
    "has_hung": True, "exit_code": 72, "rank": 1, "named_rank": 1, "phase": "train",
    "named_phase": "train", "limit_s": 8, "found_s": 15.9, "num_stacks": 2, "left": 0, "what": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"phase": "start", "named_phase": "load"}, None),
        ({"named_rank": 0}, "names rank 0, expected 1"),
        ({"named_phase": "save"}, "names phase save, expected train"),
        ({"found_s": 16.1}, "found after 16.1 s, expected at most 16 s"),
        ({"found_s": -1.0}, "found after -1.0 s"),
        ({"found_s": None}, "no failure.json"),
        ({"exit_code": 1}, "the exit code is 1, expected 72"),
        ({"num_stacks": 1}, "stacks of 1 ranks, expected 2"),
        ({"left": 3}, "3 processes were left"),
        ({"has_hung": False, "exit_code": 0}, "the rank did not hang"),
    ],
)
def test_a_trial_passes_only_where_all_holds(change: dict[str, Any], fault: str | None) -> None:
    found = faults_of(GOOD | change)
    assert found == [] if fault is None else fault in found[0]


def test_an_alarm_or_a_cost_fails_the_run_without_a_fault() -> None:
    good = {"steps": 200, "exit_code": 0, "alarm": False, "watch_cpu_share": 0.001}
    assert not faults_of_calm(good, 200)
    for change in ({"alarm": True}, {"steps": 199}, {"exit_code": 72}, {"watch_cpu_share": 0.006}):
        assert faults_of_calm(good | change, 200)


def test_trials_are_the_same_each_time_and_meet_every_rank_and_phase(tmp_path: Path) -> None:
    trials = [chosen(number, 0, tmp_path) for number in range(60)]
    assert trials == [chosen(number, 0, tmp_path) for number in range(60)]
    stopped = [trial for trial in trials if trial.kind == KINDS[0]]
    assert len(stopped) == 50
    assert {(t.rank, t.phase) for t in stopped} == {(r, p) for r in (0, 1) for p in PLACES}
    assert set(PLACES) <= set(LIMITS)


def test_every_step_of_a_trial_has_the_pass_that_is_hung(tmp_path: Path) -> None:
    """With one update a step, its own pass gives the old log-probs after the first step."""
    trials = [chosen(number, 0, tmp_path) for number in range(60)]
    trial = next(trial for trial in trials if trial.phase == "logprobs")
    recipe, *keys = overrides(tmp_path, tmp_path / "run", *keys_of(trial, tmp_path))
    assert not update_can_serve(load_recipe(recipe, keys))


def test_a_rank_hangs_inside_of_the_phase_only(tmp_path: Path, monkeypatch: Any) -> None:
    hung: list[int] = []
    come = threading.Event()
    hang = _Hang(Trial(0, "train", "stopped", 1, 0.0, str(tmp_path / "note")))

    def note() -> None:
        hung.append(hang.num_calls)
        come.set()

    monkeypatch.setattr(hang, "_hang", note)
    hang.around(lambda: None)()  # once through the phase
    hang._at_the_moment(0)  # which is over
    assert not hung
    hang.around(lambda: come.wait(60))()
    assert hung == [1]
