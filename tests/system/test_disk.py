"""What a disk refuses, in words with the path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mrl.errors import DiskFailed, InputError
from mrl.system.disk import describe, free_bytes, is_refusal, refusal, refusing, vanished
from mrl.system.files import bytes_in_words, naming, replaced
from tests.disks import can_mount, mount_disk
from tests.ranks import start_fork


@pytest.mark.parametrize(
    ("number", "words", "do"),
    [
        (errno.ENOSPC, "the disk is full", "free some space there"),
        (errno.EDQUOT, "the disk quota is used up", "free some space there"),
        (errno.EROFS, "the file system is read-only", "mount it writable"),
    ],
)
def test_path_reason_and_free_bytes(number: int, words: str, do: str, tmp_path: Path) -> None:
    file = tmp_path / "new/file"
    for error in (OSError(number, "x"), RuntimeError(f"I/O error: {os.strerror(number)} (28)")):
        with pytest.raises(OSError) as caught, naming(file):  # noqa: PT011
            raise error
        text = refusal(RuntimeError("a library"), tmp_path) or refusal(caught.value, tmp_path)
        assert text.startswith(f"{file} could not be written: {words}, ")
        assert f"B are free in {tmp_path}; {do} or move the run folder" in text
        assert is_refusal(describe(caught.value, tmp_path))
    unnamed = refusal(OSError(number, "x"), tmp_path)
    assert unnamed.startswith(f"a file in {tmp_path} could not be written")
    with pytest.raises(DiskFailed, match=words), refusing(tmp_path):
        raise OSError(number, "x", str(file))


def test_a_file_above_the_limit_of_the_process_is_no_full_disk(tmp_path: Path) -> None:
    for error in (
        OSError(errno.EFBIG, "x"),
        RuntimeError("I/O error: File too large (os error 27)"),
    ):
        with pytest.raises(OSError) as caught, naming(tmp_path / "file"):  # noqa: PT011
            raise error
        assert refusal(caught.value, tmp_path) == (
            f"{tmp_path}/file could not be written: File too large: it is above the limit of this "
            "process (ulimit -f) or of the disk; raise the limit or move the run folder, then "
            "continue the run"
        )


def _without_inodes(disk: Path, said: Path) -> None:
    mount_disk(disk, 1 << 20, num_inodes=3)
    try:
        for name in "abc":
            (disk / name).touch()
    except OSError as error:
        said.write_text(refusal(error, disk))
    os._exit(0)


@pytest.mark.skipif(not can_mount(), reason="this user may not mount a disk")
def test_a_disk_without_inodes_is_not_called_full(tmp_path: Path) -> None:
    start_fork(_without_inodes, tmp_path / "disk", tmp_path / "said").join()
    said = (tmp_path / "said").read_text()
    why = "could not be written: the disk has no inodes left, and each file needs one, 1.0 MB"
    assert said.startswith(
        f"{tmp_path}/disk/c {why} are free in {tmp_path}/disk; remove files there"
    )


def test_a_run_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    file = run / "rollouts/step_000001.jsonl"
    missing = FileNotFoundError(errno.ENOENT, "No such file", str(file))
    assert vanished(missing, run) == ""  # the file alone: another fault
    assert vanished(FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere/a/b"), run) == ""
    (run / "rollouts").rmdir()
    start = f"{file} could not be written: the folder "
    assert vanished(missing, run).startswith(
        f"{start}{run}/rollouts is gone, moved or removed while"
    )
    run.rename(tmp_path / "moved")
    assert vanished(missing, run).startswith(
        f"{start}{run} is gone, moved or removed while the run"
    )
    assert is_refusal(describe(missing, run / "rollouts/.iter_1.partial"))


def test_other_errors_are_left_as_they_are(tmp_path: Path) -> None:
    other = ValueError("no\nroom")
    with pytest.raises(ValueError, match="room"), naming(tmp_path):
        raise other
    assert refusal(other, tmp_path) == ""
    assert describe(other, tmp_path) == "ValueError: no room"
    with pytest.raises(InputError, match="Not a directory; choose another"), refusing(tmp_path):
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory")


def test_a_library_that_has_no_room_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "step.safetensors"

    def write() -> None:
        with replaced(file) as partial:
            partial.write_bytes(b"half")
            raise RuntimeError("Error while serializing: No space left on device (os error 28)")

    with pytest.raises(OSError, match="No space left") as caught:
        write()
    assert caught.value.filename == str(file)
    assert list(tmp_path.iterdir()) == []
    assert bytes_in_words(free_bytes(file) or 0)
