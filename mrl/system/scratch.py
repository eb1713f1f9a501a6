"""Folders for temporary files. If the process that owns a folder was killed, `sweep` removes it later.

Each folder has a lock file, whose lock shows whether an owner still runs. The system releases the
lock when the last process that has the lock file's descriptor exits or is killed. Unlike a PID, a
lock also works across containers.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from mrl.errors import InputError

PREFIX = "mrl-"
Kind = Literal["launch", "sglang"]
LOCK_FILE = "owner.lock"
NEW_LOCK_FILE = f"{LOCK_FILE}.new"
"""The name of the lock file until it is locked."""
UNLOCKED_S = 3600.0
"""Age in seconds after which a folder without a lock file has no owner: an owner locks its folder at
once, unless it is killed before."""
FILES_FILE = "shared_memory"
SHARED_MEMORY = Path("/dev/shm")
"""The folder of POSIX shared memory."""
MAX_SOCKET_BYTES = 107
"""The largest number of bytes in the path of a UNIX socket."""
RANDOM_CHARS = 8
"""The number of characters that `tempfile` chooses at random."""
NAME = re.compile(rf"{PREFIX}(?:{'|'.join(get_args(Kind))})-[a-z0-9_]{{{RANDOM_CHARS}}}")
"""The names that `Scratch` gives to folders."""
SHORT_FOLDER = Path("/tmp")
"""Takes the place of the system's folder for temporary files if the path of that is too long."""


class Scratch:
    """A folder for temporary files of this process, which only this process's user can read."""

    def __init__(self, kind: Kind, socket_name: str = "") -> None:
        """Create `mrl-KIND-RANDOM` in the system's folder for temporary files.

        `socket_name` is the longest name that a UNIX socket in the folder will have. If the socket's
        path would then be too long, the folder is created in SHORT_FOLDER. Raises InputError if that is
        not possible either.
        """
        prefix = f"{PREFIX}{kind}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=_place(prefix, socket_name)))
        new = self.path / NEW_LOCK_FILE
        self.descriptor = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        """Descriptor of the lock file. A child process that inherits it is also an owner."""
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        new.rename(self.path / LOCK_FILE)  # the lock file appears only once it is locked

    def note(self, files: Iterable[Path]) -> None:
        """Record the shared-memory files that are to be removed with the folder."""
        with suppress(OSError):
            (self.path / FILES_FILE).write_text("".join(f"{file.name}\n" for file in files))

    def remove(self) -> None:
        """Remove the folder and release its lock. May be called more than once."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def sweep(parent: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's scratch folders whose owners have ended, and return their paths.

    `parent` contains the folders; by default it is the system's folder for temporary files and
    SHORT_FOLDER. The files in `shared_memory` that were recorded with `note` are also removed.
    A folder without a lock file is removed only if `_was_never_locked`. Folders that cannot be read
    are left in place.
    """
    swept = []
    parents = {Path(tempfile.gettempdir()), SHORT_FOLDER} if parent is None else {parent}
    for folder in sorted(each for place in parents for each in place.glob(f"{PREFIX}*")):
        with suppress(OSError):
            if not _is_own(folder, stat.S_ISDIR):
                continue
            if _was_never_locked(folder):
                (folder / NEW_LOCK_FILE).unlink(missing_ok=True)
                folder.rmdir()  # fails if the folder has got other contents meanwhile
                swept.append(folder)
            elif _is_left(folder / LOCK_FILE):
                _unlink_noted(folder, shared_memory)
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder)
    return swept


def _place(prefix: str, socket_name: str) -> Path:
    """Return the folder in which to create `prefix` and RANDOM_CHARS random characters."""
    usual = Path(tempfile.gettempdir())
    if not socket_name:
        return usual
    max_bytes = MAX_SOCKET_BYTES - len(f"/{prefix}") - RANDOM_CHARS - len(f"/{socket_name}")
    for place in (usual, SHORT_FOLDER):
        if len(os.fsencode(place)) <= max_bytes and os.access(place, os.W_OK | os.X_OK):
            return place
    raise InputError(
        f"TMPDIR: {usual} has {len(os.fsencode(usual))} bytes, expected at most {max_bytes}, because "
        f"the path of a socket has at most {MAX_SOCKET_BYTES}; set TMPDIR to a shorter one"
    )


def _is_own(path: Path, kind: Callable[[int], bool]) -> bool:
    found = path.lstat()
    return found.st_uid == os.geteuid() and kind(found.st_mode)


def _was_never_locked(folder: Path) -> bool:
    """Return whether the owner of a folder was killed before the lock file appeared in it.

    Such a folder has a name of `Scratch`, contains at most a NEW_LOCK_FILE that no process has locked,
    and has not changed for UNLOCKED_S.
    """
    if not NAME.fullmatch(folder.name) or time.time() - folder.stat().st_mtime < UNLOCKED_S:
        return False
    names = os.listdir(folder)
    return not names or (names == [NEW_LOCK_FILE] and _is_left(folder / NEW_LOCK_FILE))


def _is_left(lock: Path) -> bool:
    """Return whether no process holds the lock. Raises FileNotFoundError if there is no lock file."""
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
    # A crash of the machine may have left other bytes in the file.
    names = noted.read_text(errors="replace").splitlines() if noted.is_file() else ()
    for name in names:
        file = shared_memory / Path(name).name
        with suppress(OSError, ValueError):
            if _is_own(file, stat.S_ISREG):
                file.unlink()
