"""A damaged result is not recorded."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks.evidence import record as records
from benchmarks.evidence.catalog import BY_NAME
from benchmarks.evidence.staleness import PAGE, RESULTS


def test_a_part_of_a_result_replaces_no_committed_one(tmp_path, monkeypatch) -> None:
    new, committed, page = tmp_path / "new", tmp_path / "committed", tmp_path / "results.md"
    shutil.copytree(RESULTS, committed)
    page.write_text(PAGE.read_text())
    monkeypatch.setattr(records, "PAGE", page)
    new.mkdir()
    for part in ({"passed": 1, "failed": 0}, {}):
        (new / "layouts.json").write_text(json.dumps(part))
        with pytest.raises(KeyError):
            records.record([BY_NAME["layouts"]], new, committed)
    for file in RESULTS.glob("*.json"):
        assert (committed / file.name).read_bytes() == file.read_bytes()
    assert page.read_text() == PAGE.read_text()
