"""Ends of the service during a tenant's work are counted on disk, until the tenant comes further."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.service.crashes import FILE, Crashes


def ended(root: Path, name: str, step: int) -> list[str]:
    """A start of the service that ends during work of `name` -> who is paused at its beginning."""
    crashes = Crashes(root)
    culprits = crashes.pop_crash_looping()
    crashes.begin("other", 7)
    crashes.end()
    crashes.begin(name, step)
    return culprits


def test_three_ends_without_progress_pause_a_tenant(tmp_path: Path) -> None:
    assert [ended(tmp_path, "ann", step) for step in (2, 2, 1)] == [[], [], []]
    assert Crashes(tmp_path).pop_crash_looping() == ["ann"]
    assert Crashes(tmp_path).pop_crash_looping() == []  # it was resumed: three more
    assert [ended(tmp_path, "ann", -1) for _ in range(4)] == [[], [], [], ["ann"]]


def test_progress_a_clean_stop_and_leaving_are_no_ends(tmp_path: Path) -> None:
    assert [ended(tmp_path, "ann", step) for step in range(8)] == [[]] * 8
    for _ in range(8):
        crashes = Crashes(tmp_path)
        assert crashes.pop_crash_looping() == []
        crashes.begin("ann", 7)
        crashes.end()
    assert ended(tmp_path, "ann", 7) == []
    assert ended(tmp_path, "ann", 7) == []
    Crashes(tmp_path).forget("ann")
    assert ended(tmp_path, "ann", 7) == []
    assert ended(tmp_path, "ann", 7) == []


@pytest.mark.parametrize("text", ["", "[]", '{"under_way": "a"}', '{"ends": {"a": [1]}}'])
def test_a_damaged_file_is_written_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert Crashes(tmp_path).pop_crash_looping() == []
    assert ended(tmp_path, "ann", 0) == []


def test_a_rank_without_a_folder_counts_nothing(tmp_path: Path) -> None:
    crashes = Crashes(None)
    crashes.begin("ann", 0)
    assert crashes.pop_crash_looping() == []
    assert not list(tmp_path.iterdir())
