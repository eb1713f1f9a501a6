"""Folders for temporary files that the next start sweeps away where their owner was killed.

A lock says whether an owner lives. The system lets go of it with the last process that has the folder's
descriptor, however that process ends, and also tells it across containers, where a process number would
not do.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

PREFIX = "mrl-"
LOCK_FILE = "owner.lock"
FILES_FILE = "shared_memory"
SHARED_MEMORY = Path("/dev/shm")


class Scratch:
    """A `Scratch` is a folder for temporary files of this process, which only its user can read."""

    def __init__(self, kind: str) -> None:
        """Make `mrl-KIND-RANDOM` in the folder for temporary files."""
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        new = self.path / f"{LOCK_FILE}.new"
        self.descriptor = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        """A child that inherits it is an owner, too."""
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        new.rename(self.path / LOCK_FILE)  # nobody sees it unlocked

    def note(self, files: Iterable[Path]) -> None:
        """Name the files of shared memory that are to go with the folder."""
        with suppress(OSError):
            (self.path / FILES_FILE).write_text("".join(f"{file.name}\n" for file in files))

    def remove(self) -> None:
        """Remove the folder; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def sweep(parent: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the scratch folders of this user whose owners are gone, and return them.

    `parent` holds the folders, by default the system's folder for temporary files. Whatever cannot be
    read or removed stays.
    """
    swept = []
    for folder in sorted((parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*")):
        with suppress(OSError):
            if _is_own(folder, stat.S_ISDIR) and _is_left(folder / LOCK_FILE):
                _unlink_noted(folder, shared_memory)
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder)
    return swept


def _is_own(path: Path, kind: Callable[[int], bool]) -> bool:
    found = path.lstat()
    return found.st_uid == os.geteuid() and kind(found.st_mode)


def _is_left(lock: Path) -> bool:
    """Whether nobody holds the lock. Raises FileNotFoundError where there is none."""
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _unlink_noted(folder: Path, shared_memory: Path) -> None:
    noted = folder / FILES_FILE
    for name in noted.read_text().splitlines() if noted.is_file() else ():
        file = shared_memory / Path(name).name
        with suppress(OSError):
            if _is_own(file, stat.S_ISREG):
                file.unlink()
