"""Check that the run folder can be created and written to."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from mrl.errors import InputError
from mrl.run.folder import RunFolder
from mrl.system.disk import existing


def check_output(folder: RunFolder) -> None:
    """Raise InputError if no folder can be created in the run folder or its nearest existing parent.

    InputError is also raised if the path of a folder that the run needs is a file. The check
    creates a folder and removes it again. Reading the permissions would not be enough: root has
    every permission, but cannot write to /proc. A full disk is not an error here; `check_room`
    checks the free space.
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
            f"output_dir {root}: no folder can be created in {place} ({error.strerror}); choose another"
        ) from None


def _must_be_folders(folder: RunFolder) -> list[Path]:
    """Return the paths that must not be files: the run folder, its parents and its subfolders."""
    root = folder.root.absolute()
    inner = (folder.rollouts, folder.tokens, folder.diagnosis, folder.checkpoints, folder.logs)
    return [*reversed(root.parents), root, *inner, folder.evals]
