"""tests/durations.json, by which the workers share out the files, is about the files that there are."""

from __future__ import annotations

import json

from tests.conftest import DURATIONS, ROOT


def test_measured_times_are_of_these_files() -> None:
    measured = set(json.loads(DURATIONS.read_text()))
    there = {str(f.relative_to(ROOT)) for f in (ROOT / "tests").rglob("test_*.py")}
    apart = sorted(measured ^ there)
    assert len(apart) <= len(there) / 10, f"make test-times writes {DURATIONS.name} anew: {apart}"
