"""`python -m benchmarks.mutations`: what is broken, and whether the tests of a small project notice."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import mutations
from benchmarks.mutations import (
    ROOT,
    attempt,
    breakable,
    changes_of,
    clone,
    draw,
    first_that_catches,
    known_rows,
    near_tests,
)

SOURCE = '''"""A docstring with 1 number."""
import os


def first(rows: list[int], limit: int = 2) -> int:
    """Return 1."""
    if not rows and limit < 3:
        raise ValueError(f"got {limit + 1}" + "!")
    os.sync()
    return list(zip(rows, rows, strict=True))[0][0] + limit
'''
WHOLE = "list(zip(rows, rows, strict=True))[0][0] + limit"


def test_what_can_be_changed() -> None:
    found = {(change.line, change.before, change.after) for change in changes_of(SOURCE)}
    assert found == {
        (5, "2", "3"),
        (7, "not rows and limit < 3", "(not rows or limit < 3)"),
        (7, "not rows", "(rows)"),
        (7, "limit < 3", "limit <= 3"),
        (7, "3", "4"),
        (9, "os.sync()", "pass"),
        (10, WHOLE, f"({WHOLE.replace('+', '-')})"),
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


def test_a_test_that_fails_once_has_not_caught_a_break(tmp_path: Path) -> None:
    (tmp_path / "mrl/run").mkdir(parents=True)
    (tmp_path / "mrl/run/first.py").write_text(SOURCE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  release: no\n")
    (tmp_path / "tests/run").mkdir(parents=True)
    (tmp_path / "tests/run/test_first.py").write_text(
        "import logging\nfrom pathlib import Path\nimport pytest\n"
        "FLAG = Path(__file__).with_suffix('.flag')\n"
        "@pytest.mark.parametrize('what', ['a - b'])\n"
        "def test_it(what):\n    if not FLAG.exists():\n        FLAG.touch()\n"
        "        logging.getLogger('server').error('did not start in test_first.py: late')\n"
        "        assert False\n"
        "def test_it_works():\n    assert WORKS\nWORKS = True\n"
    )
    change = changes_of(SOURCE)[0]
    assert attempt(tmp_path, "mrl/run/first.py", change)["caught_by"] == ""
    file = tmp_path / "tests/run/test_first.py"
    file.with_suffix(".flag").unlink()
    assert first_that_catches(tmp_path, ["-n2", "tests"], 60) == ""  # ends with another status
    file.write_text(file.read_text().replace("WORKS = True", "WORKS = False"))
    file.with_suffix(".flag").unlink()
    caught = "tests/run/test_first.py::test_it_works"
    assert attempt(tmp_path, "mrl/run/first.py", change)["caught_by"] == caught


def test_a_break_that_a_killed_process_left_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, git = tmp_path / "origin", ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (origin / "mrl").mkdir(parents=True)
    (origin / "mrl/first.py").write_text(SOURCE)
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], cwd=origin, check=True)
    monkeypatch.setattr(mutations, "ROOT", origin)
    (tmp_path / "clone.partial").mkdir()  # of a start that was killed while it cloned
    root = clone(tmp_path)
    (root / "mrl/first.py").write_text("broken")
    assert clone(tmp_path) == root
    assert (root / "mrl/first.py").read_text() == SOURCE


def test_without_near_tests_all_have_the_long_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mrl/engines").mkdir(parents=True)
    (tmp_path / "mrl/engines/first.py").write_text(SOURCE)
    limits = []
    monkeypatch.setattr(mutations, "run_tests", lambda *given: limits.append(given[1:]) or (0, ""))
    assert attempt(tmp_path, "mrl/engines/first.py", changes_of(SOURCE)[0])["caught_by"] == ""
    assert limits == [(["--cache-clear"], mutations.WHOLE_S)]


def test_near_a_package_are_the_tests_that_import_from_it(tmp_path: Path) -> None:
    (tmp_path / "tests/other").mkdir(parents=True)
    for name, text in (("one", "from parallel import prepare"), ("two", "# parallel\nimport os")):
        (tmp_path / f"tests/other/test_{name}.py").write_text(text + "\n")
    assert near_tests(tmp_path, "parallel/__init__.py") == ["tests/other/test_one.py"]


def test_rows_of_other_breaks_are_not_continued(tmp_path: Path) -> None:
    one, other = changes_of(SOURCE)[:2]
    rows = [{"number": 0, "file": "a.py", **one._asdict()}]
    rows += [{"number": 1, "file": "a.py", **one._asdict()}]
    file, whole = tmp_path / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(whole + '{"num')
    assert known_rows(file, [("a.py", one), ("a.py", other)]) == {0: rows[0]}
    assert file.read_text() == whole
