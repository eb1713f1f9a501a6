"""The committed runs of `make collapse`: what is kept, what continues from it, and its report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from studies import collapse
from studies.collapse_study import kept
from studies.collapse_study.kept import continue_kept, file_of, keep
from studies.stability_study.jobs import open_results
from tests.studies.test_collapse import MAIN, TOY, study

SETTINGS: dict[str, Any] = {"keys": ("a", "b"), "num_steps": 60}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "RESULTS", tmp_path)


def test_only_finished_runs_of_the_whole_study_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    with pytest.raises(SystemExit, match=r"it has no settings\.json"):
        keep(folder, "study", SETTINGS)
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    with pytest.raises(SystemExit, match=r"it has no calibration\.json"):
        keep(folder, "study", SETTINGS)
    (folder / "calibration.json").write_text("{}")
    with pytest.raises(SystemExit, match="no study with finished runs"):
        keep(folder, "study", SETTINGS)
    (folder / "results.jsonl").write_text('{"seed": 0}\n{"se')
    with pytest.raises(SystemExit, match="other settings"):
        keep(folder, "study", {**SETTINGS, "num_steps": 5})
    assert not file_of("study").exists()
    assert keep(folder, "study", SETTINGS) == file_of("study")

    other = tmp_path / "other"
    with pytest.raises(SystemExit, match="--folder"):
        continue_kept(other, "study", {**SETTINGS, "num_steps": 5})
    assert not other.exists()  # so that the whole study can still continue there
    continue_kept(other, "study", SETTINGS)
    assert (other / "results.jsonl").read_text() == '{"seed": 0}\n'
    assert kept.kept(other, SETTINGS)["results"] == [{"seed": 0}]  # a clone can report them at once
    assert open_results(other, SETTINGS, fresh=False) == [{"seed": 0}]


def test_a_folder_of_other_settings_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    for name, text in (("settings", SETTINGS), ("calibration", {})):
        (folder / f"{name}.json").write_text(json.dumps(text))
    (folder / "results.jsonl").write_text('{"seed": 0}\n')
    keep(folder, "study", SETTINGS)
    (folder / "results.jsonl").unlink()
    (folder / "settings.json").write_text("{}")
    continue_kept(folder, "study", SETTINGS)
    assert not (folder / "results.jsonl").exists()


def test_the_finished_runs_are_reported_without_running_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(collapse.settings_of(TOY, TOY.num_steps)))
    scales = {"scales": {str(rate): rate for rate in TOY.rates}}
    (tmp_path / "calibration.json").write_text(json.dumps(scales))
    finished = study({})[:24]  # the control and all arms at 10%, three seeds
    (tmp_path / "results.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in finished))
    arguments = ["collapse", "--report", "--seeds", "3", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as left:
        collapse.main()
    assert left.value.code == 1
    shown = capsys.readouterr().out
    assert "FAILED all 66 runs were made" in shown
    found = json.loads((tmp_path / "collapse.json").read_text())
    assert found["whole_claim"] == "refuted"
    assert found["claim"][MAIN.replace("10%", "1%")] == "incomplete"
    assert {row["rate"] for row in found["rows"]} == {0.0, 0.1}
    assert (tmp_path / "collapse.svg").is_file()
