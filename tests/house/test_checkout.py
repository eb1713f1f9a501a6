"""The top level holds what belongs there, and a test run leaves nothing behind in the checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.checkout import TOP_LEVEL, left_files, tracked_top_level
from tests.conftest import ROOT


def test_only_what_belongs_there_is_tracked_at_the_top() -> None:
    tracked = tracked_top_level(ROOT)
    if tracked is None:
        pytest.skip("this is no git checkout")
    assert tracked <= TOP_LEVEL, f"remove them: {sorted(tracked - TOP_LEVEL)}"


def test_a_file_that_a_test_leaves_is_found(tmp_path: Path) -> None:
    assert left_files(tmp_path) == set()  # no checkout
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("/runs/\n*.so\n")
    before = left_files(tmp_path)
    for name in ("s.yaml", "mrl/new_room.py", "mrl/_C.so", "tests/dump.jsonl", "runs/one/log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert left_files(tmp_path) - before == {"s.yaml", "tests/dump.jsonl", "runs/one"}
