"""`mrl check` finds out whether the run folder can be made, also as root."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.errors import InputError
from mrl.preflight.output import check_output
from mrl.run.folder import RunFolder


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    check_output(RunFolder(tmp_path / "new/run"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "checkpoints").mkdir()
    check_output(RunFolder(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints"]


def test_a_folder_that_nobody_can_make_is_refused() -> None:
    with pytest.raises(InputError, match=r"output_dir /proc/x: no folder can be made in /proc \("):
        check_output(RunFolder("/proc/x"))


@pytest.mark.parametrize("name", ["", "checkpoints", "rollouts", "tokens"])
def test_a_file_in_the_way_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / (name or "file")
    file.touch()
    folder = RunFolder(tmp_path / "run" if name else file / "below")
    with pytest.raises(InputError, match=f": {file} is not a folder; choose another"):
        check_output(folder)
