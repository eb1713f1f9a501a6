"""The committed runs of `make collapse`: what is kept, and what continues from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from studies.collapse_study import kept
from studies.collapse_study.kept import continue_kept, file_of, keep

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
