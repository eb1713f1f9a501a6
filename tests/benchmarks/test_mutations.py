"""`python -m benchmarks.mutations`: what is broken, and whether the tests of a small project notice."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.mutations import ROOT, attempt, breakable, changes_of, draw, near_tests

SOURCE = '''"""A docstring with 1 number."""
import os


def first(rows: list[int], limit: int = 2) -> int:
    """Return 1."""
    if not rows and limit < 3:
        raise ValueError(f"got {limit + 1}" + "!")
    os.sync()
    return rows[0] + limit
'''


def test_what_can_be_changed() -> None:
    found = {(change.line, change.before, change.after) for change in changes_of(SOURCE)}
    assert found == {
        (5, "2", "3"),
        (7, "not rows and limit < 3", "(not rows or limit < 3)"),
        (7, "not rows", "(rows)"),
        (7, "limit < 3", "limit <= 3"),
        (7, "3", "4"),
        (9, "os.sync()", "pass"),
        (10, "rows[0] + limit", "(rows[0] - limit)"),
        (10, "0", "1"),
    }
    for change in changes_of(SOURCE):
        data, end = SOURCE.encode(), change.start + len(change.before)
        ast.parse(data[: change.start] + change.after.encode() + data[end:])


def test_the_same_breaks_are_drawn_again() -> None:
    lines = breakable(ROOT)
    once = draw(lines, 0, 50)
    assert once == draw(lines, 0, 50)
    assert len({(name, change.line) for name, change in once}) == 50
    assert once != draw(lines, 1, 50)
    assert "tests/parallel/test_dims.py" in near_tests(ROOT, "parallel/dims.py")
    assert "tests/disaggregated/test_ledger_cases.py" in near_tests(
        ROOT, "mrl/scheduling/ledger.py"
    )
    assert "tests/learn/test_shaping.py" in near_tests(ROOT, "mrl/learn/batching.py")


def test_a_break_is_caught_or_not_and_mended(tmp_path: Path) -> None:
    for folder in ("mrl/scheduling", "tests/scheduling"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("mrl", "mrl/scheduling"):
        (tmp_path / folder / "__init__.py").touch()
    name = "mrl/scheduling/first.py"
    (tmp_path / name).write_text(SOURCE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  release: no\n")
    (tmp_path / "tests/scheduling/test_first.py").write_text(
        "from mrl.scheduling.first import first\ndef test_it():\n    assert first([5], 2) == 7\n"
    )
    for line, caught in ((10, "tests/scheduling/test_first.py::test_it"), (5, "")):
        change = next(each for each in changes_of(SOURCE) if each.line == line)
        assert attempt(tmp_path, name, change)["caught_by"] == caught
        assert (tmp_path / name).read_text() == SOURCE
