"""Writes a file whole: whoever reads it, meanwhile or after a crash, finds all of it or what was there.

The content is written to a hidden file beside the target, `.NAME.partial`, which is then given the
target's name. A process that is killed meanwhile leaves that hidden file; the next write replaces it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mrl.errors import DISK_ERRORS, InputError

_BY_WORDS = {os.strerror(number): number for number in DISK_ERRORS}


@contextmanager
def replaced(file: Path, *, durable: bool = False) -> Iterator[Path]:
    """Give a path to write to, which gets the name of `file` when the block ends.

    If the block raises, `file` stays as it was and no partial output remains. With `durable`, the
    content and then the new name are on the disk before this returns, so that they survive a crash of
    the machine. Raises OSError where the file cannot be written; what the disk refuses names `file`.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        with naming(file):
            yield partial
            if durable:
                sync(partial)
            partial.replace(file)
    except BaseException:
        with suppress(OSError):  # on a read-only file system, whose name counts
            partial.unlink(missing_ok=True)
        raise
    if durable:
        sync(file.parent)


def lock_folder(folder: Path, user: str) -> IO[str]:
    """Lock a folder until the returned file is closed, here and in forks, or the processes end.

    Raises InputError if another process, a running `user`, has locked it, and OSError if the lock's
    file cannot be written.
    """
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise InputError(
            f"output_dir {folder} is in use by a running {user}; choose another output_dir"
        ) from None
    return lock


def write_whole(
    file: Path, content: str | bytes | Iterable[bytes], *, durable: bool = False
) -> None:
    """Write `content` (text as UTF-8) to `file`; see `replaced`."""
    if isinstance(content, str):
        content = content.encode()
    with replaced(file, durable=durable) as partial, partial.open("wb") as stream:
        stream.writelines([content] if isinstance(content, bytes) else content)


def disk_errno(error: BaseException) -> int | None:
    """Return the number of the disk's error that `error` is, or quotes; None for every other error.

    Libraries in other languages keep the system's words and drop its number.
    """
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return error.errno
    text = str(error)
    return next((number for words, number in _BY_WORDS.items() if words in text), None)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise what the disk refuses in the block as an OSError that names `path`."""
    try:
        yield
    except Exception as error:
        number = disk_errno(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bytes_in_words(num_bytes: int) -> str:
    """Return a number of bytes as in `12.3 MB`, with decimal prefixes."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
