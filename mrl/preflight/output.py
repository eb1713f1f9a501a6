"""Checks that the run folder can be made and written, by making a folder where it will be."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from mrl.errors import InputError
from mrl.run.folder import RunFolder
from mrl.system.disk import existing


def check_output(folder: RunFolder) -> None:
    """Make a folder in the run folder, or where that will be, and remove it again.

    Rights alone do not tell: root may write everywhere, and not in /proc. A disk that is full is left
    to `check_room`. Raises InputError.
    """
    root = folder.root
    files = [each for each in _ways(folder) if each.exists() and not each.is_dir()]
    if files:
        raise InputError(
            f"output_dir {root}: {files[0]} is not a folder; choose another, or move the file away"
        )
    place = existing(root)
    try:
        with tempfile.TemporaryDirectory(prefix=".mrl-check-", dir=place):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return
        raise InputError(
            f"output_dir {root}: no folder can be made in {place} ({error.strerror}); choose another"
        ) from None


def _ways(folder: RunFolder) -> list[Path]:
    """Return what must be folders: those above the run folder, it itself, and those in it."""
    root = folder.root.absolute()
    inner = (folder.rollouts, folder.tokens, folder.diagnosis, folder.checkpoints, folder.logs)
    return [*reversed(root.parents), root, *inner, folder.evals]
