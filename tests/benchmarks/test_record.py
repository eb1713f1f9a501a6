"""How checks and goals are counted, and what is not recorded: damaged results, results whose pages
cannot be made, and older ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.evidence import record as records
from benchmarks.evidence.__main__ import PLAIN_LINE
from benchmarks.evidence.catalog import BY_NAME
from benchmarks.evidence.result import finish
from benchmarks.evidence.staleness import PAGE, RESULTS

LAYOUTS, WIRE = BY_NAME["layouts"], BY_NAME["route_wire"]


def test_a_part_of_a_result_replaces_no_committed_one(tmp_path, monkeypatch) -> None:
    new, committed, page = tmp_path / "new", tmp_path / "committed", tmp_path / "results.md"
    shutil.copytree(RESULTS, committed)
    page.write_text(PAGE.read_text())
    monkeypatch.setattr(records, "PAGE", page)
    monkeypatch.setattr(records, "mark", lambda folder: False)
    new.mkdir()
    for part in ({"passed": 1, "failed": 0}, {}):
        (new / "layouts.json").write_text(json.dumps(part))
        recorded = records.record([BY_NAME["layouts"]], new, committed)
        assert recorded.lines == []
        assert isinstance(recorded.errors["layouts"], KeyError)
    for file in RESULTS.glob("*.json"):
        assert (committed / file.name).read_bytes() == file.read_bytes()
    assert page.read_text() == PAGE.read_text()


@pytest.fixture
def folders(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """New and committed results, of which the new ones were made a year after 2030."""
    new, committed, page = tmp_path / "new", tmp_path / "committed", tmp_path / "results.md"
    new.mkdir()
    committed.mkdir()
    page.write_text(PAGE.read_text())
    monkeypatch.setattr(records, "PAGE", page)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "NEW", new)
    monkeypatch.setattr(
        records, "mark", lambda folder: page.write_text(page.read_text() + "marked")
    )
    for name in ("layouts", "route_wire"):
        result = json.loads((RESULTS / f"{name}.json").read_text())
        (committed / f"{name}.json").write_text(json.dumps(result | {"date": "2030-01-01"}))
        (new / f"{name}.json").write_text(json.dumps(result | {"date": "2031-01-01"}))
    return new, committed


def date_of(folder: Path, name: str) -> str:
    return json.loads((folder / f"{name}.json").read_text())["date"]


def test_a_result_whose_pages_cannot_be_made_does_not_keep_others_from_being_recorded(
    folders, monkeypatch
) -> None:
    new, committed = folders

    def pages_of(target, name, result):
        if name == "layouts":
            raise ValueError("no marker")
        return {records.PAGE: "a page, "}

    monkeypatch.setattr(records, "pages_of", pages_of)
    recorded = records.record([LAYOUTS, WIRE], new, committed)
    assert [line.partition(":")[0] for line in recorded.lines] == ["route_wire"]
    assert str(recorded.errors["layouts"]) == "no marker"
    assert date_of(committed, "layouts") == "2030-01-01"
    assert date_of(committed, "route_wire") == "2031-01-01"
    assert records.PAGE.read_text() == "a page, marked"


def test_an_older_result_does_not_replace_a_newer_one(folders) -> None:
    new, committed = folders
    recorded = records.record([WIRE], committed, new)
    assert (
        "the new result is of 2030-01-01 and the committed one of 2031-01-01" in recorded.lines[0]
    )
    assert date_of(new, "route_wire") == "2031-01-01"


@pytest.mark.parametrize(
    ("given", "line", "code"),
    [((2, 0), "2 passed, 0 failed", 0), ((2, 0, 1), "2 passed, 0 failed, 1 goal missed", 0),
     ((2, 1, 3), "2 passed, 1 failed, 3 goals missed", 1)],
)  # fmt: skip
def test_a_missed_goal_is_counted_and_fails_nothing(given, line, code, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        finish(*given)
    assert (left.value.code, capsys.readouterr().out) == (code, line + "\n")
    assert PLAIN_LINE.match(line)
