"""`mrl check` finds out whether the run folder can be made, also as root."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import InputError
from mrl.preflight import output
from mrl.preflight.output import check_output
from mrl.run.folder import RunFolder


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    check_output(RunFolder(tmp_path / "new/run"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "checkpoints").mkdir()
    check_output(RunFolder(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints"]


def test_a_folder_that_nobody_can_make_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"output_dir /proc/x: no folder can be created in /proc \("
    ):
        check_output(RunFolder("/proc/x"))


def test_a_full_disk_is_left_to_the_check_of_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(code: int) -> None:
        def make(**where: Any) -> None:
            raise OSError(code, "no")

        monkeypatch.setattr(output.tempfile, "TemporaryDirectory", make)

    for code in (errno.ENOSPC, errno.EDQUOT):
        fail(code)
        check_output(RunFolder(tmp_path))
    fail(errno.EROFS)
    with pytest.raises(InputError, match=f"output_dir {tmp_path}: no folder can be created in"):
        check_output(RunFolder(tmp_path))


@pytest.mark.parametrize("name", ["", "checkpoints", "rollouts", "tokens"])
def test_a_file_in_the_way_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / (name or "file")
    file.touch()
    folder = RunFolder(tmp_path / "run" if name else file / "below")
    with pytest.raises(InputError, match=f": {file} is not a folder; choose another"):
        check_output(folder)
