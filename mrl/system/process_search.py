"""Finds processes by an environment variable that they inherited, and kills them.

Without root, this is the only way to find those descendants of a worker that have left the worker's
session (`setsid`) or whose parent has exited. A process that has cleared its environment is not
found.

`python -m mrl.system.process_search NAME VALUE` kills the processes with this variable when its
standard input ends, which happens at the latest when the process that started it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.05
KILLED_S = 5.0
"""Seconds during which killing is repeated, because processes may start new processes meanwhile."""


def find_by_variable(name: str, value: str) -> list[int]:
    """Return the PIDs of processes whose environment has the variable `name` with the value `value`.

    This process is left out. Zombies are not found, because they have no environment.
    """
    mark, found = f"{name}={value}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(folder.name))
    return found


def kill_by_variable(name: str, value: str, grace_s: float = 0.0) -> int:
    """Kill the processes that `find_by_variable` finds, and return how many were killed.

    Processes that exit within `grace_s` seconds are not killed.
    """
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


def main() -> None:
    name, value = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its parent
    print("ready", flush=True)
    sys.stdin.buffer.read()
    kill_by_variable(name, value)


if __name__ == "__main__":
    main()
