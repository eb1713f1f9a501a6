"""Handles standard output and standard error if they are closed or their device is full.

A stream that was closed when the command started is replaced by /dev/null. If a stream cannot be
written to while the command runs, the command ends as it does for a full disk.
"""

from __future__ import annotations

import io
import os
import resource
import select
import stat
import sys
from typing import TextIO

from mrl.errors import DISK_ERRORS

_DEV_FULL = os.makedev(1, 7)
_NAMES = {"stdout": "standard output", "stderr": "standard error"}


def open_missing() -> None:
    """Redirect closed streams to /dev/null. Let the other streams escape the characters that their
    encoding lacks, so that printing a sample or a path does not fail."""
    for name in _NAMES:
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
        if stream is None:
            # This is the stream's own descriptor unless a library has taken it.
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.set_inheritable(descriptor, descriptor <= 2)
            setattr(sys, name, open(descriptor, "w", errors="backslashreplace"))  # noqa: SIM115


def unwritable_stream(*, has_failed: bool = True) -> str:
    """Return the name of a standard stream that cannot be written to; empty if there is none.

    Each stream is flushed. The flush fails if a text that could not be written is still in the
    stream's buffer. A long text bypasses the buffer, so if `has_failed` says that a write has failed,
    the function also checks whether the device or file of the stream is full.
    """
    for name, words in _NAMES.items():
        stream: TextIO = getattr(sys, name)
        try:
            stream.flush()
        except BrokenPipeError:
            continue
        except OSError as error:
            if error.errno in DISK_ERRORS:
                return words
        if has_failed and _is_full(stream):
            return words
    return ""


def is_closed_pipe(stream: TextIO) -> bool:
    """Return whether a stream is the write end of a pipe whose read end is closed."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a file, as in tests
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _is_full(stream: TextIO) -> bool:
    """Return whether a stream goes to /dev/full, or to a file that cannot become larger."""
    try:
        there, disk = os.fstat(stream.fileno()), os.fstatvfs(stream.fileno())
    except (OSError, ValueError):  # not a file, as in tests
        return False
    if stat.S_ISREG(there.st_mode):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        above = limit != resource.RLIM_INFINITY and there.st_size >= limit
        return above or (disk.f_blocks > 0 and disk.f_bavail == 0)
    return stat.S_ISCHR(there.st_mode) and there.st_rdev == _DEV_FULL


def silence_unwritable() -> str:
    """Redirect every unwritable standard stream to /dev/null.

    Return the names of these streams as text, such as `standard output and standard error`; empty if
    there are none.
    """
    found = []
    while name := unwritable_stream(has_failed=False):
        found.append(name)
        stream = sys.stdout if name == _NAMES["stdout"] else sys.stderr
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    return " and ".join(found)
