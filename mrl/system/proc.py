"""Reads /proc/PID/stat, for processes that import as little as a launcher or a monitor does."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """What Linux says of a process that is there, if only as a zombie."""

    state: str
    """One letter: `T` and `t` are stopped, `Z` and `X` have ended."""
    parent: int
    cpu_s: float
    """Its CPU time, with that of the children that it has waited for."""
    started: str
    """When it started, in the kernel's ticks: a later process with its number has another value."""

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def has_ended(self) -> bool:
        return self.state in ("Z", "X")


def stat_of(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if there is none with this number."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        return ProcessStat(fields[0], int(fields[1]), cpu_s, fields[19])
    return None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger."""
    stat = stat_of(pid)
    return stat is not None and stat.is_stopped


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    stat = stat_of(pid)
    return stat is not None and not stat.has_ended
