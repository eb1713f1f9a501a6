"""The folder of a node in which a run keeps its snapshots, by default in host memory. No torch.

The folder belongs to the user (mode 0700), and its name is made of the user's number and of the path of
the run. A file in it holds a random token: ranks that read the same token share the folder, whatever
their hosts are called. Each rank holds a lock on that file, so that other runs know the folder is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from mrl.errors import InputError

HOST_MEMORY = Path("/dev/shm")
KEY = "checkpoint.snapshot_folder"
TOKEN = ".node"
SWEPT_AFTER_S = 24 * 3600.0
"""The age at which snapshots of runs that no longer run are removed by the next run with snapshots."""


def node_folder(run: Path, given: str | None) -> Path:
    """Return the folder for the run folder `run`, in the recipe's folder or in host memory."""
    digest = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]
    return Path(given or HOST_MEMORY) / f"mrl-{os.getuid()}-{digest}"


class NodeFolder:
    """A `NodeFolder` is claimed by every rank of a node, and removed by one of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: IO[str] | None = None

    def claim(self) -> str:
        """Make the folder, lock it for this process, and return its token.

        Raises InputError where it cannot be made, or is not this user's alone.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(self.root)
            while True:
                self._write_token()
                self._lock = (self.root / TOKEN).open()
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                if os.fstat(self._lock.fileno()).st_nlink:  # not swept in between
                    return self._lock.read()
                self.close()
                self.root.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{KEY}: {self.root}: {error.strerror}; give a folder of this node that can be written"
            ) from None

    def _write_token(self) -> None:
        own = self.root / f"{TOKEN}.{os.getpid()}.{secrets.token_hex(4)}"
        own.write_text(secrets.token_hex(16))
        with suppress(FileExistsError):
            os.link(own, self.root / TOKEN)  # whole, and the first one stays
        own.unlink()

    def close(self) -> None:
        """Give up the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def num_bytes(self) -> int:
        """Return the bytes of all files in it."""
        return sum(f.stat().st_size for f in self.root.rglob("*") if f.is_file())

    def clear(self, keep: str = "") -> None:
        """Remove every snapshot but the folder called `keep`, and what was half written."""
        for folder in (*self.root.glob("iter_*"), *self.root.glob(".iter_*")):
            if folder.name != keep:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder, for a run that needs no snapshot any more."""
        shutil.rmtree(self.root, ignore_errors=True)

    def sweep(self) -> list[Path]:
        """Remove the folders of this user's other runs that run no more and are old; return them."""
        swept = []
        for folder in self.root.parent.glob(f"mrl-{os.getuid()}-" + "[0-9a-f]" * 16):
            with suppress(OSError):
                if folder != self.root and _is_litter(folder):
                    shutil.rmtree(folder)
                    swept.append(folder)
        return swept


def _check_owner(root: Path) -> None:
    found = root.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return
    raise InputError(
        f"{KEY}: {root} is not a folder that only user {os.getuid()} can read and write (it is "
        f"{stat.filemode(found.st_mode)} of user {found.st_uid}), so its files cannot be trusted; "
        "remove it, or give another folder"
    )


def _is_litter(folder: Path) -> bool:
    """Whether a folder is this user's, old, and locked by no process."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    if time.time() - found.st_mtime < SWEPT_AFTER_S:
        return False
    try:
        with (folder / TOKEN).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True
