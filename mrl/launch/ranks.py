"""The launcher's watchdog, which checks the ranks while the run's own watchdog does not.

It checks before the run's watchdog has started, and after the first rank has ended. It is needed
because torch waits for its ranks without a limit, even if they are stopped (SIGSTOP) or hang while
they import modules.
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
"""The seconds that a rank may be stopped (SIGSTOP) before it is killed."""
IDLE_S = 600.0
"""The seconds that a starting rank may make no progress before it is killed. The limit no longer
applies once the rank has started and waits for the other ranks."""
CPU_S, BYTES = 1.0, 1 << 16
"""A starting rank counts as idle until it has used CPU_S more seconds of CPU time, or read BYTES more
bytes. A thread that only polls does not reach these numbers within IDLE_S."""


class _Work(NamedTuple):
    """The CPU time that a process has used and the bytes that it has read since its start."""

    cpu_s: float
    num_bytes: int


class LauncherWatchdog:
    """Checks the ranks of a launcher, and kills a rank for which the others would wait forever."""

    def __init__(self, folder: Path, *, has_watchdog: bool) -> None:
        """Set up a watchdog without starting it.

        `folder` is the launcher's folder. `has_watchdog` tells whether the ranks run a command that
        starts the run's watchdog. If it is false, a rank may be idle for any time.
        """
        self._folder, self._has_watchdog = folder, has_watchdog
        self._known: set[int] = set()
        self._stopped_s: dict[int, float] = {}
        self._idle: dict[int, tuple[_Work, float]] = {}
        self.failure: Failure | None = None
        """The failure of a rank that was killed before the run's watchdog had started; None if there
        is no such rank."""

    def run(self) -> None:
        """Check the ranks repeatedly until the launcher ends and has removed its temporary folder."""
        while self._folder.exists():
            time.sleep(CHECK_EVERY_S)
            self.check()

    def check(self) -> None:
        """Check the ranks once, and kill a rank that has been stopped or idle for too long.

        Every call counts as `CHECK_EVERY_S` seconds, even if more time has passed because this
        process itself was stopped.
        """
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
        """Kill a rank that hangs while it starts. torch then ends the other ranks.

        If several ranks hang, `failure` describes only the first.
        """
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
        """Kill a rank that has been suspended (SIGSTOP) for too long after another rank has ended.

        The other rank has ended normally: after a failure, torch itself would have killed all ranks.
        The kill is therefore not reported as a failure.
        """
        text = f"mrl: process {pid} has been stopped (SIGSTOP) for {STOPPED_S:g} s"
        print(f"{text}, and other ranks have ended: killing it", file=sys.stderr, flush=True)
        with suppress(OSError):
            (self._folder / OVER_FILE).touch()
            os.kill(pid, signal.SIGKILL)

    def _idle_s(self, pid: int) -> float:
        """Return for how many seconds a rank has neither computed nor read.

        Returns 0 if the rank has reported that it has started (by a file in the launcher's folder),
        or if the rank is stopped (SIGSTOP).
        """
        if self._stopped_s[pid] or (self._folder / arrived_file(rank_of(pid) or 0)).exists():
            self._idle.pop(pid, None)
            return 0.0
        work = _work_of(pid)
        before, idle_s = self._idle.get(pid, (work, 0.0))
        is_active = work.cpu_s - before.cpu_s >= CPU_S or work.num_bytes - before.num_bytes >= BYTES
        self._idle[pid] = (work, 0.0) if is_active else (before, idle_s + CHECK_EVERY_S)
        return self._idle[pid][1]


def children() -> list[int]:
    """Return the pids of the child processes of this process. For a launcher, these are its ranks."""
    found = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += [int(pid) for pid in file.read_text().split()]
    return found


def rank_of(pid: int) -> int | None:
    """Return the value of RANK in the environment of a process; None if it cannot be read."""
    with suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry.removeprefix(b"RANK="))
    return None


def _work_of(pid: int) -> _Work:
    """Return the CPU time of a process and the number of bytes that it has read.

    The bytes are those of its read calls plus those fetched from the disk, for example for mapped
    files. A read call that goes to the disk is therefore counted twice.
    """
    stat, num_bytes = stat_of(pid), 0
    with suppress(OSError, ValueError):
        counts = dict(x.split(": ") for x in Path(f"/proc/{pid}/io").read_text().splitlines())
        num_bytes = int(counts["rchar"]) + int(counts["read_bytes"])
    return _Work(0.0 if stat is None else stat.cpu_s, num_bytes)
