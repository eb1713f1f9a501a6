"""The launcher's own watchdog, for the times in which the run's watchdog does not watch the ranks:
before it has started, and once a rank has ended.

torch waits for its ranks without a limit, even if they are stopped or hang while they import.
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

CHECK_EVERY_S = 1.0
STOPPED_S = 60.0
"""How long a rank may be stopped."""
IDLE_S = 600.0
"""How long a rank may neither compute nor read until it waits for the other ranks."""
CPU_S, BYTES = 1.0, 1 << 16
"""The CPU time and the bytes that count as progress; a thread that polls uses less."""


class _Work(NamedTuple):
    """The CPU time and the bytes read of a process since its start."""

    cpu_s: float
    num_bytes: int


class LauncherWatchdog:
    """Checks the ranks of a launcher, and kills one for which the others would wait for ever."""

    def __init__(self, folder: Path, *, has_watchdog: bool) -> None:
        """`folder`: that of the launcher. `has_watchdog`: whether the ranks run a command that starts
        the watchdog; with other commands an idle rank is not an error."""
        self._folder, self._has_watchdog = folder, has_watchdog
        self._known: set[int] = set()
        self._stopped_s: dict[int, float] = {}
        self._idle: dict[int, tuple[_Work, float]] = {}
        self.failure: Failure | None = None
        """The failure of the rank that was killed before the watchdog had started."""

    def run(self) -> None:
        """Check until the launcher has removed its folder."""
        while self._folder.exists():
            time.sleep(CHECK_EVERY_S)
            self.check()

    def check(self) -> None:
        """Check once. At least `CHECK_EVERY_S` passed since the last check; a longer pause, in which
        this process itself was stopped, counts as that much."""
        self._known.update(children())
        alive = {pid for pid in self._known if is_running(pid)}
        have_ended = len(alive) < len(self._known)
        if not have_ended and (self._folder / WATCHED_FILE).exists():
            self._stopped_s.clear()
            return
        for pid in sorted(alive):
            stopped_s = self._stopped_s.get(pid, 0.0) + CHECK_EVERY_S if is_stopped(pid) else 0.0
            self._stopped_s[pid] = stopped_s
            idle_s = 0.0 if have_ended or not self._has_watchdog else self._idle_s(pid)
            if stopped_s > STOPPED_S and have_ended:
                self._end_last(pid)
            elif stopped_s > STOPPED_S:
                self._end(
                    pid, "is stopped (SIGSTOP)", stopped_s, "a user, a debugger or the scheduler"
                )
            elif idle_s > IDLE_S:
                self._end(pid, "neither computes nor reads", idle_s, "a hanging file system")

    def _end(self, pid: int, how: str, since_s: float, cause: str) -> None:
        """Kill a rank that hangs while it starts; torch then ends the others. If several hang, the
        report names the first."""
        number = rank_of(pid)
        if self.failure is None:
            self.failure = Failure(
                what=f"rank {number} {how}: {since_s:.0f} s while starting, before the watchdog ran",
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
        """Kill a rank that is stopped after another one has ended normally; if one has failed, torch
        kills the others itself."""
        text = f"mrl: process {pid} has been stopped (SIGSTOP) for {STOPPED_S:g} s"
        print(f"{text}, and other ranks have ended: killing it", file=sys.stderr, flush=True)
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
        self._idle[pid] = (work, 0.0) if goes_on else (before, idle_s + CHECK_EVERY_S)
        return self._idle[pid][1]


def children() -> list[int]:
    """Return the processes that this one started: the ranks of a launcher."""
    found = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += [int(pid) for pid in file.read_text().split()]
    return found


def rank_of(pid: int) -> int | None:
    """Return the rank of a process from its environment; None if that cannot be read."""
    with suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry.removeprefix(b"RANK="))
    return None


def _work_of(pid: int) -> _Work:
    """Return the work of a process; of mapped files, the pages that it had to read count."""
    stat, num_bytes = stat_of(pid), 0
    with suppress(OSError, ValueError):
        counts = dict(x.split(": ") for x in Path(f"/proc/{pid}/io").read_text().splitlines())
        num_bytes = int(counts["rchar"]) + int(counts["read_bytes"])
    return _Work(0.0 if stat is None else stat.cpu_s, num_bytes)
