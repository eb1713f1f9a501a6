"""A file system that forgets what was not synced: what a power cut leaves of a folder.

`Recorder` wraps os.fsync, through which everything here reaches the disk. A file keeps the bytes that
it had at its last fsync, a folder the names that it had at its own. `after_cut` builds a folder of
these alone, as the strictest file system would: a name without an fsync of its folder is gone, and a
file without one is empty. Inodes stay open, so that no number is used again.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any


class Recorder:
    """Records every fsync under `root`; `cuts` holds what each left, in order."""

    def __init__(self, root: Path, kept: Path) -> None:
        self.root, self.kept = root, kept
        self.cuts: list[Path] = []
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._held: list[int] = []
        self._fsync = os.fsync

    def __enter__(self) -> Recorder:
        os.fsync = self.fsync
        return self

    def __exit__(self, *exc: object) -> None:
        os.fsync = self._fsync
        for number in self._held:
            os.close(number)

    def fsync(self, file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        self._fsync(number)
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if path != self.root and self.root not in path.parents:
            return
        self._held.append(os.dup(number))
        found = os.fstat(number)
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._contents[found.st_ino] = path.read_bytes()
        self.cuts.append(self.after_cut())

    def after_cut(self) -> Path:
        """Build what a power cut would leave now."""
        folder = self.kept / f"cut_{len(self.cuts):03d}"
        self._build(folder, self.root.stat().st_ino)
        return folder

    def _build(self, folder: Path, inode: int) -> None:
        folder.mkdir(parents=True)
        for name, each in self._names.get(inode, {}).items():
            if each in self._contents:
                (folder / name).write_bytes(self._contents[each])
            elif each in self._names:
                self._build(folder / name, each)
            else:
                (folder / name).touch()
