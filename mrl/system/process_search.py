"""Finds processes by an environment variable that they inherit, and kills those that are left.

Without root there is no other way to find a process that left its session (`setsid`) or whose parent
is gone. A process whose environment was cleared is not found.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.05
KILLED_S = 5.0
"""How long to keep killing; processes may start others meanwhile."""


def find_by_variable(name: str, value: str) -> list[int]:
    """Return the other processes with this variable in their environment; zombies have none."""
    mark, found = f"{name}={value}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(folder.name))
    return found


def kill_by_variable(name: str, value: str, grace_s: float = 0.0) -> int:
    """Kill those of these processes that have not ended within `grace_s`; return how many were
    killed."""
    now = time.monotonic()
    grace, deadline = now + grace_s, now + grace_s + KILLED_S
    killed: set[int] = set()
    while (left := find_by_variable(name, value)) and time.monotonic() < deadline:
        if time.monotonic() >= grace:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        time.sleep(POLL_S)
    return len(killed)
