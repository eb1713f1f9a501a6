"""Checks that the run folder can be created and written, by creating a folder there."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from mrl.errors import InputError
from mrl.run.folder import RunFolder
from mrl.system.disk import existing


def check_output(folder: RunFolder) -> None:
    """Create a folder in the run folder, or in its nearest existing parent, and remove it again.

    Permissions alone are not enough: root has them everywhere, but cannot write in /proc. `check_room`
    checks for a full disk. Raises InputError.
    """
    root = folder.root
    files = [each for each in _must_be_folders(folder) if each.exists() and not each.is_dir()]
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


def _must_be_folders(folder: RunFolder) -> list[Path]:
    """Return the paths that must be folders: the run folder, its parents, and the folders in it."""
    root = folder.root.absolute()
    inner = (folder.rollouts, folder.tokens, folder.diagnosis, folder.checkpoints, folder.logs)
    return [*reversed(root.parents), root, *inner, folder.evals]
