"""The files that nodes send each other for a snapshot."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.errors import DiskFailed
from parallel.checkpoint import file_moves
from parallel.checkpoint.file_moves import Move
from parallel.checkpoint.manifest import DIGEST, MANIFEST, FileRecord, record, write_manifest
from parallel.checkpoint.snapshot_files import share, small_files


def test_partial_output_of_a_killed_process_is_no_small_file(tmp_path: Path) -> None:
    """A share that was being received may be as large as the memory."""
    names = ("common.pt", share(0))
    for name in (*names, f".{share(1)}.partial", ".common.pt.partial"):
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path, {"step": 1}, {name: record(tmp_path / name) for name in names})
    assert set(small_files(tmp_path)) == {"common.pt", MANIFEST, DIGEST}


def test_partial_output_that_cannot_be_removed_keeps_no_rank_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a disk that became read-only while a file was received."""
    mesh: Any = SimpleNamespace(rank=0)
    agreed: list[str | None] = []

    def first_reason(reason: str | None) -> str | None:
        agreed.append(reason)
        return reason

    def refuse(*args: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(file_moves, "first_reason", first_reason)
    empty = FileRecord(0, hashlib.sha256().hexdigest())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(DiskFailed):
            file_moves.move_files(mesh, [Move(1, 0, "a")], tmp_path, {"a": empty})
    assert len(agreed) == 2
