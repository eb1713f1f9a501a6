"""Atomic writes: a reader sees either the new content or the previous content, even after a crash.

The content is written to a hidden file next to the target, `.NAME.partial`, which is then renamed.
A process that is killed meanwhile leaves the hidden file behind; the next write replaces it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mrl.errors import DISK_ERRORS, InputError

_BY_WORDS = {os.strerror(number): number for number in DISK_ERRORS}
_LIBC = ctypes.CDLL(None)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replaced(file: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to `file` when the `with` block ends.

    If the block raises an exception, `file` is unchanged and no partial output remains. With `durable`,
    the content and then the new name are synced to disk before the block is left, so that they survive
    a crash of the machine. Raises OSError if the file cannot be written. If the disk is the cause, for
    example because it is full, the error names `file`.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        with naming(file):
            yield partial
            if durable:
                sync(partial)
            partial.replace(file)
    except BaseException:
        with suppress(OSError):  # keep the first error, e.g. of a read-only disk
            partial.unlink(missing_ok=True)
        raise
    if durable:
        sync(file.parent)


def lock_folder(folder: Path, user: str) -> IO[str]:
    """Lock a folder until this process and its forks have closed the returned lock file or ended.

    Raises InputError if another process has locked the folder, and OSError if the lock file cannot
    be written. `user` is the word for that other process in the error message, such as `job`.
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
    """Write `content` (a string as UTF-8) to `file` atomically.

    `durable` and errors are described in `replaced`.
    """
    if isinstance(content, str):
        content = content.encode()
    with replaced(file, durable=durable) as partial, partial.open("wb") as stream:
        stream.writelines([content] if isinstance(content, bytes) else content)


def exchange(first: Path, second: Path) -> bool:
    """Let two files or folders in one folder exchange their names, in a single step. Return whether
    that was done; some systems and file systems, such as network file systems, do not offer it."""
    call = getattr(_LIBC, "renameat2", None)
    if call is None:
        return False
    paths = os.fsencode(first), os.fsencode(second)
    return call(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0


def disk_errno(error: BaseException) -> int | None:
    """Return the errno of a disk error (full, over quota, read-only, file too large); otherwise None.

    An error of any type also counts if its message contains the system's text of a disk error,
    because libraries in other languages keep the text but not the number.
    """
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return error.errno
    text = str(error)
    return next((number for words, number in _BY_WORDS.items() if words in text), None)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn a disk error of the `with` block into an OSError that names `path`.

    Disk errors are those that `disk_errno` recognises. Other errors are passed on unchanged.
    """
    try:
        yield
    except Exception as error:
        number = disk_errno(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def text_or_empty(file: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    with suppress(OSError):
        return file.read_text()
    return ""


def bytes_in_words(num_bytes: int) -> str:
    """Format a number of bytes like `12.3 MB`, with decimal prefixes."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
