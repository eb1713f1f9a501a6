"""Reads the lines that are added to a file, also while the file is replaced, cut or removed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

READ_BYTES = 4 << 20
"""The largest number of bytes that one call of `poll` reads."""
MAX_LINE_BYTES = 16 << 20
"""A longer line is skipped."""
CHECKED_BYTES = 64
"""So many bytes before the place at which reading continues are compared with those that were read
there, to notice that a file was rewritten in place."""


@dataclass
class News:
    """What `Tail.poll` found."""

    lines: list[bytes] = field(default_factory=list)
    """Whole lines, without their line breaks."""
    is_new: bool = False
    """Whether the lines are the first ones of another content: the file was just found, replaced, cut
    or rewritten."""
    is_missing: bool = False
    is_behind: bool = False
    """Whether there is more to read at once."""
    num_skipped: int = 0
    """The number of lines that were too long."""


class Tail:
    """The place in a file up to which its lines were read.

    The file stays open, so the rest of one that is renamed or removed is still read. A last line
    without a line break is left for a later call.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.offset = 0
        """The bytes of the file that were read so far."""
        self.size = 0
        """The size of the file when it was last looked at."""
        self._descriptor: int | None = None
        self._identity: tuple[int, int] = (0, 0)
        self._seen: tuple[int, int] = (0, 0)
        self._partial = bytearray()
        self._skips = False
        """Whether the rest of a line that is too long is being skipped."""
        self._last = b""

    def poll(self) -> News:
        """Return the lines since the last call, at most about READ_BYTES of them. Never raises
        OSError: what cannot be read counts as missing."""
        there = self._status()
        if self._descriptor is not None:
            is_other = there is None or (there.st_dev, there.st_ino) != self._identity
            if is_other and (rest := self._read(is_missing=there is None)).lines:
                rest.is_behind = True
                return rest
            if there is None:
                return News(is_missing=True)
            if not is_other:
                return self._read(is_new=self._is_rewritten(there))
        if there is None or not self._open():
            return News(is_missing=True)
        return self._read(is_new=True)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()  # pages come and go while the server runs

    def _status(self) -> os.stat_result | None:
        with suppress(OSError, ValueError):
            there = os.stat(self.file)
            return there if stat.S_ISREG(there.st_mode) else None
        return None

    def _open(self) -> bool:
        self.close()
        try:
            descriptor = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        there = os.fstat(descriptor)
        if not stat.S_ISREG(there.st_mode):  # a pipe took its place
            os.close(descriptor)
            return False
        self._descriptor, self._identity = descriptor, (there.st_dev, there.st_ino)
        self._rewind()
        return True

    def _rewind(self) -> None:
        self.offset, self._partial, self._skips, self._last = 0, bytearray(), False, b""
        self._seen = (0, 0)

    def _is_rewritten(self, there: os.stat_result) -> bool:
        """Return whether the file has another content than the one that was read; if so, go back to
        its beginning."""
        seen, self._seen = self._seen, (there.st_size, there.st_mtime_ns)
        if seen == self._seen:
            return False
        is_other = there.st_size < self.offset
        if not is_other and self._last and self._descriptor is not None:
            at = self.offset - len(self._last)
            with suppress(OSError):
                is_other = os.pread(self._descriptor, len(self._last), at) != self._last
        if is_other:
            self._rewind()
            self._seen = (there.st_size, there.st_mtime_ns)
        return is_other

    def _read(self, *, is_new: bool = False, is_missing: bool = False) -> News:
        assert self._descriptor is not None
        try:
            self.size = os.fstat(self._descriptor).st_size
            data = os.pread(self._descriptor, READ_BYTES, self.offset)
        except OSError:  # such as a stale handle of a network file system
            self.close()
            return News(is_missing=True)
        self.offset += len(data)
        self._last = (self._last + data)[-CHECKED_BYTES:]
        news = News(is_new=is_new, is_missing=is_missing, is_behind=len(data) == READ_BYTES)
        *lines, rest = data.split(b"\n")
        for line in lines:
            if self._skips:
                news.num_skipped += 1
            else:
                news.lines.append(bytes(self._partial) + line)
            self._partial.clear()
            self._skips = False
        if not self._skips:
            self._partial += rest
        if len(self._partial) > MAX_LINE_BYTES:
            self._partial.clear()
            self._skips = True
        return news
