"""Standard output and standard error that are closed, or whose device takes no more.

A command goes on without a stream that was closed when it started, as with /dev/null. One that takes no
more while it runs ends the command as a disk does that is full.
"""

from __future__ import annotations

import os
import resource
import stat
import sys
from typing import TextIO

from mrl.errors import DISK_ERRORS

_DEV_FULL = os.makedev(1, 7)
_NAMES = {"stdout": "standard output", "stderr": "standard error"}


def open_missing() -> None:
    """Let what is printed to a stream that is closed go nowhere."""
    for name in _NAMES:
        if getattr(sys, name) is None:
            # The lowest free number: that of the stream, unless a library has taken it.
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.set_inheritable(descriptor, descriptor <= 2)
            setattr(sys, name, open(descriptor, "w", errors="backslashreplace"))  # noqa: SIM115


def refusing_stream(*, has_failed: bool = True) -> str:
    """Return the name of a standard stream that takes no more; empty where both do.

    What could not be written may still be in its buffer, and writing it again fails in the same way. A
    long text is not kept there: then the device is asked, where something `has_failed`.
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


def _is_full(stream: TextIO) -> bool:
    """Whether a stream goes to /dev/full, or to a file that can grow no more."""
    try:
        there, disk = os.fstat(stream.fileno()), os.fstatvfs(stream.fileno())
    except (OSError, ValueError):  # no file: a test's
        return False
    if stat.S_ISREG(there.st_mode):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        above = limit != resource.RLIM_INFINITY and there.st_size >= limit
        return above or (disk.f_blocks > 0 and disk.f_bavail == 0)
    return stat.S_ISCHR(there.st_mode) and there.st_rdev == _DEV_FULL


def silence_refusing() -> str:
    """Let what is printed to a stream that cannot be written to go nowhere; return the names of these
    streams."""
    found = []
    while name := refusing_stream(has_failed=False):
        found.append(name)
        stream = sys.stdout if name == _NAMES["stdout"] else sys.stderr
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    return " and ".join(found)
