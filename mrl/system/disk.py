"""Messages about failed writes, with the path, the reason, and the free bytes of the file system.

`mrl.system.files.naming` adds the path to an error when it occurs; this module turns the error into
a message.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mrl.errors import DISK_ERRORS, DiskFailed, InputError
from mrl.system.files import bytes_in_words, disk_errno
from mrl.system.streams import unwritable_stream

GONE = "is gone, moved"
"""Words in the message about a folder that no longer exists."""
NO_INODES = "the disk has no inodes left"
"""The reason given if a disk has free bytes but no room for another file."""


def refusal(error: BaseException, place: Path) -> str:
    """Return one line that says why a write failed, with the path and the number of free bytes.

    The result is empty unless `error` or one of its causes is about a full or read-only disk, a
    quota or the maximum file size (`DISK_ERRORS`). If the error names no file, the line names the
    standard stream that cannot be written to, or else the folder `place`.
    """
    for each in chain(error):
        if (number := disk_errno(each)) is not None:
            named = each.filename if isinstance(each, OSError) else None
            if named is None and (stream := unwritable_stream()):
                return (
                    f"{stream} could not be written: {DISK_ERRORS[number]}; redirect it to a terminal "
                    "or to a file on another disk, then start the command again"
                )
            what = f"a file in {place}" if named is None else os.fsdecode(named)
            return _in_words(number, what, place if named is None else Path(os.fsdecode(named)))
    return ""


def vanished(error: BaseException, folder: Path) -> str:
    """Return one line if `error` shows that a run folder, or a folder in it, no longer exists.

    `folder` is the run folder. The result is empty if `error` has another cause.
    """
    for each in chain(error):
        if not isinstance(each, (FileNotFoundError, NotADirectoryError)) or each.filename is None:
            continue
        parent = Path(os.path.abspath(os.fsdecode(each.filename))).parent
        place = folder.absolute()
        is_in = parent.is_relative_to(place) or place.is_relative_to(parent)
        if is_in and not parent.is_dir():
            gone = next(p for p in (*reversed(parent.parents), parent) if not p.is_dir())
            return (
                f"{os.fsdecode(each.filename)} could not be written: the folder {gone} {GONE} "
                "or removed while the run was writing to it; put it back, then continue the run"
            )
    return ""


def bytes_below(folder: Path) -> int:
    """Return the total bytes of all files below a folder. Files that disappear meanwhile count as 0."""
    num_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                num_bytes += os.lstat(os.path.join(place, name)).st_size
    return num_bytes


def describe(error: Exception, place: Path) -> str:
    """Describe in one line why a file in `place` could not be written."""
    if isinstance(error, DiskFailed):
        return str(error)
    found = refusal(error, place) or vanished(error, place.parent)
    return found or f"{type(error).__name__}: {' '.join(str(error).split())}"


def is_refusal(text: str) -> bool:
    """Return whether a rank's message `text` contains a text that `refusal` or `vanished` returns."""
    return any(words in text for words in (*DISK_ERRORS.values(), NO_INODES, GONE))


@contextmanager
def refusing(place: Path) -> Iterator[None]:
    """Turn an OSError of the `with` block into DiskFailed or InputError.

    DiskFailed is raised if the disk is the cause (`refusal`), and InputError for any other OSError.
    `place` is the folder that the block writes to.
    """
    try:
        yield
    except OSError as error:
        if text := refusal(error, place):
            raise DiskFailed(text) from None
        raise InputError(f"output_dir {place}: {error.strerror}; choose another") from None


def require_room(path: Path, num_bytes: int) -> None:
    """Raise DiskFailed if the file system reports fewer than `num_bytes` free bytes for `path`."""
    free = free_bytes(path)
    if free is not None and free < num_bytes:
        raise DiskFailed(
            f"{DISK_ERRORS[errno.ENOSPC]}: it needs {bytes_in_words(num_bytes)}, and "
            f"{bytes_in_words(free)} are free in {existing(path)}; free some space there or move "
            "the run folder, then continue the run"
        )


def free_bytes(path: Path) -> int | None:
    """Return the free bytes on the file system of `path`, which need not exist.

    The result is None if the file system does not report its free bytes.
    """
    try:
        usage = shutil.disk_usage(existing(path))
    except OSError:
        return None
    return usage.free if usage.total else None


def existing(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then its cause (or else its context), and so on along the chain."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _in_words(number: int, what: str, path: Path) -> str:
    there, free = existing(path), free_bytes(path)
    left = "" if free is None else f", {bytes_in_words(free)} are free in {there}"
    why, do = DISK_ERRORS[number], "free some space there"
    if number == errno.EROFS:
        do = "mount it writable"
    elif number == errno.EFBIG:
        left, do = "", "raise the limit"
    elif number == errno.ENOSPC and _has_no_inodes(there):
        why, do = f"{NO_INODES}, and each file needs one", "remove files there"
    then = f"{do} or move the run folder, then continue the run"
    return f"{what} could not be written: {why}{left}; {then}"


def _has_no_inodes(path: Path) -> bool:
    """Return whether the file system of `path` has a limited number of inodes and all are used."""
    with suppress(OSError):
        numbers = os.statvfs(path)
        return bool(numbers.f_files) and not numbers.f_favail
    return False
