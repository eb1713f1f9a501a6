"""The folder in which a run keeps its snapshots on one node, by default in host memory (/dev/shm).

The folder belongs to the user (mode 0700), and its name consists of the user's id and a digest of
the run's path. A file in the folder holds a random token: ranks that read the same token share the
folder, whatever their hosts are called. Each rank locks that file, so that other runs know that the
folder is in use. This module does not import torch.
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
"""The age, in seconds, from which the snapshots of an ended run may be removed. The next run that
takes snapshots on the node removes them."""


def node_folder(run: Path, given: str | None) -> Path:
    """Return the path of a run's snapshot folder. It is inside the folder `given`, or in host
    memory (/dev/shm) if `given` is None. `run` is the run's own folder."""
    digest = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]
    return Path(given or HOST_MEMORY) / f"mrl-{os.getuid()}-{digest}"


class NodeFolder:
    """The snapshot folder of this node. Every rank of the node claims it, and one of them removes
    it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: IO[str] | None = None

    def claim(self) -> str:
        """Make the folder, lock it for this process, and return its token: a random string, which is
        the same for all ranks that share the folder.

        Raises InputError if the folder cannot be made, or if other users can access it.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(self.root)
            while True:
                self._write_token()
                self._lock = (self.root / TOKEN).open()
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                if os.fstat(self._lock.fileno()).st_nlink:  # no other run has removed it meanwhile
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
            os.link(own, self.root / TOKEN)  # atomic, and the first rank's token stays
        own.unlink()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def num_bytes(self) -> int:
        """Return the total size in bytes of all files in the folder."""
        return sum(f.stat().st_size for f in self.root.rglob("*") if f.is_file())

    def clear(self, keep: str = "") -> None:
        """Remove the snapshots in this folder, incomplete ones too, except the one in the subfolder
        called `keep`."""
        for folder in (*self.root.glob("iter_*"), *self.root.glob(".iter_*")):
            if folder.name != keep:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder. Call this when the run no longer needs a snapshot."""
        shutil.rmtree(self.root, ignore_errors=True)

    def sweep(self) -> list[Path]:
        """Remove this user's folders of other runs if they are older than SWEPT_AFTER_S and no
        process uses them. Return the paths of the removed folders."""
        swept = []
        for folder in self.root.parent.glob(f"mrl-{os.getuid()}-" + "[0-9a-f]" * 16):
            with suppress(OSError):
                if folder != self.root and _is_abandoned(folder):
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


def _is_abandoned(folder: Path) -> bool:
    """Return whether a folder belongs to this user, is older than SWEPT_AFTER_S, and is locked by no
    process."""
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
