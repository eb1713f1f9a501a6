"""Reads /proc with few imports, for launchers and monitors."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """State of a process, which may be a zombie."""

    state: str
    """One letter: `T` or `t` if the process is stopped, `Z` or `X` if it has ended."""
    parent: int
    cpu_s: float
    """CPU time in seconds, including the time of children for which the process has waited."""
    started: str
    """Start time in the kernel's ticks. A later process with the same PID has a different value."""

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def has_ended(self) -> bool:
        return self.state in ("Z", "X")


def stat_of(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if no process has this PID."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        return ProcessStat(fields[0], int(fields[1]), cpu_s, fields[19])
    return None


def kernel_and_namespace(kind: str) -> str:
    """Return a text that is equal for processes of one running kernel in the same namespace of `kind`
    (`net`, `pid`); empty if it cannot be read."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{kind}')}"
    return ""


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger."""
    stat = stat_of(pid)
    return stat is not None and stat.is_stopped


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not exited."""
    stat = stat_of(pid)
    return stat is not None and not stat.has_ended
