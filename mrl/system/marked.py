"""Finds processes by a mark in their environment, which they inherit, and ends what is left of them.

A process that leaves its session (`setsid`) or whose parent is gone can be found in no other way
without rights of root. One whose environment was emptied is not found.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.05
KILLED_S = 5.0
"""How long Linux may take to end what is killed, which may start others meanwhile."""


def find_marked(name: str, value: str) -> list[int]:
    """Return the processes that run with this variable in their environment, this one left out; zombies
    have none."""
    mark, found = f"{name}={value}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(folder.name))
    return found


def end_marked(name: str, value: str, grace_s: float = 0.0) -> int:
    """Kill these processes where they have not ended within `grace_s`; return how many were killed."""
    now = time.monotonic()
    grace, deadline = now + grace_s, now + grace_s + KILLED_S
    killed: set[int] = set()
    while (left := find_marked(name, value)) and time.monotonic() < deadline:
        if time.monotonic() >= grace:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        time.sleep(POLL_S)
    return len(killed)
