"""The ranks as their launcher sees them where no watchdog does: before it has begun, and once a rank
has ended.

torch waits for its ranks without a limit, whether they are stopped, or hang while they import.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mrl.errors import ExitCode
from mrl.run.failure import OVER_FILE, Failure
from mrl.system.launcher import WATCHED_FILE, arrived_file
from mrl.system.proc import is_running, is_stopped, stat_of

LOOK_S = 1.0
STOPPED_S = 60.0
"""How long a rank may be stopped."""
IDLE_S = 600.0
"""How long a rank may neither compute nor read before it has come to where it waits for the others."""
CPU_S, BYTES = 1.0, 1 << 16
"""What shows that a rank goes on; a thread that polls uses less."""


class _Work(NamedTuple):
    """What a process has done since its start."""

    cpu_s: float
    num_bytes: int


class RankWatch:
    """Looks at the ranks of a launcher, and kills one that keeps the others waiting for ever."""

    def __init__(self, folder: Path, *, has_watchdog: bool) -> None:
        """`folder`: that of the launcher. `has_watchdog`: whether the ranks run a command that starts
        the watchdog; the idle ones of other commands are not at fault."""
        self._folder, self._has_watchdog = folder, has_watchdog
        self._known: set[int] = set()
        self._stopped_s: dict[int, float] = {}
        self._idle: dict[int, tuple[_Work, float]] = {}
        self.failure: Failure | None = None
        """What is known of the rank that was killed before the watchdog had begun."""

    def run(self) -> None:
        """Look until the launcher has removed its folder."""
        while self._folder.exists():
            time.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Look once; `LOOK_S` have passed since the last time, or this process was stopped itself."""
        self._known.update(children())
        alive = {pid for pid in self._known if is_running(pid)}
        have_ended = len(alive) < len(self._known)
        if not have_ended and (self._folder / WATCHED_FILE).exists():
            self._stopped_s.clear()
            return
        for pid in sorted(alive):
            stopped_s = self._stopped_s.get(pid, 0.0) + LOOK_S if is_stopped(pid) else 0.0
            self._stopped_s[pid] = stopped_s
            idle_s = 0.0 if have_ended or not self._has_watchdog else self._idle_s(pid)
            if stopped_s > STOPPED_S and have_ended:
                self._end_last(pid)
            elif stopped_s > STOPPED_S:
                self._end(
                    pid, "is stopped (SIGSTOP)", stopped_s, "a user, a debugger or the scheduler"
                )
            elif idle_s > IDLE_S:
                self._end(pid, "neither computes nor reads", idle_s, "a file system that hangs")

    def _end(self, pid: int, how: str, since_s: float, cause: str) -> None:
        """Kill a rank that hangs in its start; torch then ends the others. Where several hang, the
        report is on the first."""
        number = rank_of(pid)
        if self.failure is None:
            self.failure = Failure(
                what=f"rank {number} {how}: {since_s:.0f} s in its start, before it was watched",
                exit_code=int(ExitCode.HUNG_RANK),
                rank=number,
                host=socket.gethostname(),
                phase="start",
                since_s=since_s,
                cause=cause,
            )
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)

    def _end_last(self, pid: int) -> None:
        """Kill a rank that is stopped though another one has ended well; where one has failed, torch
        kills the others itself."""
        text = f"mrl: process {pid} is stopped (SIGSTOP) for {STOPPED_S:g} s, others have ended"
        print(f"{text}: it is killed", file=sys.stderr, flush=True)
        with suppress(OSError):
            (self._folder / OVER_FILE).touch()
            os.kill(pid, signal.SIGKILL)

    def _idle_s(self, pid: int) -> float:
        """Return how long a rank has done nothing; 0 once it waits for the others, or is stopped."""
        if self._stopped_s[pid] or (self._folder / arrived_file(rank_of(pid) or 0)).exists():
            self._idle.pop(pid, None)
            return 0.0
        work = _work_of(pid)
        before, idle_s = self._idle.get(pid, (work, 0.0))
        goes_on = work.cpu_s - before.cpu_s >= CPU_S or work.num_bytes - before.num_bytes >= BYTES
        self._idle[pid] = (work, 0.0) if goes_on else (before, idle_s + LOOK_S)
        return self._idle[pid][1]


def children() -> list[int]:
    """Return the processes that this one started: the ranks of a launcher."""
    found = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += [int(pid) for pid in file.read_text().split()]
    return found


def rank_of(pid: int) -> int | None:
    """Return the rank of a process by its environment; None where that cannot be read."""
    with suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry.removeprefix(b"RANK="))
    return None


def _work_of(pid: int) -> _Work:
    """Return what a process has done; what it maps counts by the pages that it had to read."""
    stat, num_bytes = stat_of(pid), 0
    with suppress(OSError, ValueError):
        counts = dict(x.split(": ") for x in Path(f"/proc/{pid}/io").read_text().splitlines())
        num_bytes = int(counts["rchar"]) + int(counts["read_bytes"])
    return _Work(0.0 if stat is None else stat.cpu_s, num_bytes)
