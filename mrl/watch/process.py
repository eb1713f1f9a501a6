"""The process of a rank, as its monitor sees it: heartbeat page, state in /proc, and stacks."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mrl.run.failure import TAIL_LINES
from mrl.system.heartbeat import (
    SIZE,
    kind_of,
    read_collective,
    read_page,
    read_samples,
    read_writer,
)
from mrl.system.proc import stat_of
from mrl.watch.verdict import GONE, Observation

TICK_S = 0.2
STACKS_S = 2.0
"""The seconds that ranks may take to write the stack traces of their threads."""
MOVES_BYTES = ("load", "save")
"""The phases in which reading or writing files counts as progress. In other phases it does not
count, because ranks may also read and write files while they wait."""
BEAT_BYTES = 1 << 16
"""A process shows progress each time it has read or written this many more bytes. Polling a file
reads fewer bytes."""

MAIN_STACK = signal.SIGUSR2
"""The signal that asks a rank for the stack trace of its main thread."""
ALL_STACKS = signal.SIGRTMIN + 7
"""The signal that asks a rank for those of all its threads. faulthandler reads them while the threads
run, and a rank whose threads begin and end at that moment can crash (SIGSEGV)."""
MAIN_HEAD = "Stack (most recent call first):"
"""The line with which faulthandler begins the answer to MAIN_STACK."""
TGKILL = {"x86_64": 234, "aarch64": 131}
"""The number of Linux's system call tgkill, by machine. glibc has the function only since 2.30."""
NO_FILE = -1


@dataclass
class Process:
    """The process of a rank on this node."""

    rank: int
    pid: int
    page: mmap.mmap
    stacks: int
    """The file descriptor of the file to which faulthandler writes the stack traces; NO_FILE if the
    file could not be opened."""
    started: str
    """The start time of the process, which distinguishes it from a later process with the same
    pid."""

    @classmethod
    def open(cls, rank: int, pid: int, page: str, stacks: str) -> Process:
        """Open the heartbeat page and the stack file of a rank.

        A rank that is ending may have closed these files, or may have reused their descriptors for
        other files. If the page cannot be opened, an empty page is used, so that nothing is known
        about the rank.
        """
        memory, found = mmap.mmap(-1, SIZE), NO_FILE
        with suppress(OSError, ValueError):
            descriptor = os.open(page, os.O_RDONLY)
            try:
                memory = mmap.mmap(descriptor, SIZE, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
        with suppress(OSError):
            found = os.open(stacks, os.O_RDONLY | os.O_CLOEXEC)
        return cls(rank, pid, memory, found, _started(pid))

    def see(self) -> Observation:
        stat = stat_of(self.pid)
        state = stat.state if stat is not None and stat.started == self.started else ""
        pulse = read_page(self.page)
        if kind_of(pulse.phase) in MOVES_BYTES and state:
            moved = _moved(f"{self.pid}/task/{self.pid}")
            pid = read_writer(self.page)
            writer = stat_of(pid) if pid else None
            if writer is not None and writer.parent == self.pid:
                moved += _moved(str(pid))
                state = (
                    writer.state if writer.is_stopped else state
                )  # the rank may be waiting for it
            pulse = pulse._replace(beats=pulse.beats + moved // BEAT_BYTES)
        return Observation(pulse, state, read_collective(self.page), read_samples(self.page))

    def send(self, number: int) -> None:
        """Send a signal to the process, if it still exists."""
        with suppress(ProcessLookupError):
            if _started(self.pid) == self.started:
                os.kill(self.pid, number)

    def send_to_main_thread(self, number: int) -> None:
        """Send a signal to the process's main thread, if it still exists. A signal to the process may
        be handled by any thread when a stopped process is continued."""
        call = TGKILL.get(platform.machine())
        if call is None:
            self.send(number)
        elif _started(self.pid) == self.started:
            ctypes.CDLL(None).syscall(call, self.pid, self.pid, int(number))

    def read_stacks(self) -> str:
        with suppress(OSError):
            size = os.fstat(self.stacks).st_size
            return os.pread(self.stacks, size, 0).decode(errors="replace")
        return ""


def stacks_of(ranks: Iterable[Process], asks: signal.Signals | int) -> dict[int, str]:
    """Make every rank, even a stopped one, write stack traces; return what each has written so far.

    asks: MAIN_STACK or ALL_STACKS. This takes at most STACKS_S seconds. A rank that has written
    nothing is left out.
    """
    ranks = list(ranks)
    waiting = [rank for rank in ranks if rank.see().state not in GONE]
    begin = sizes = {rank.rank: len(rank.read_stacks()) for rank in ranks}
    for rank in waiting:
        # For all stacks any thread will do: the main one may have its signals blocked.
        (rank.send_to_main_thread if asks == MAIN_STACK else rank.send)(asks)
        rank.send(signal.SIGCONT)  # the handler runs before anything else
    deadline = time.monotonic() + STACKS_S
    while waiting and time.monotonic() < deadline:
        time.sleep(TICK_S)
        before, sizes = sizes, {rank.rank: len(rank.read_stacks()) for rank in ranks}
        # A rank is done when its file no longer grows.
        waiting = [
            rank
            for rank in waiting
            if (sizes[rank.rank] == begin[rank.rank] or sizes[rank.rank] != before[rank.rank])
            and rank.see().state not in GONE
        ]
    return {rank.rank: text for rank in ranks if (text := rank.read_stacks())}


def kill(ranks: Iterable[Process], last: int) -> None:
    """Kill ranks. Their engines and workers die with them.

    The rank with the pid `last` is killed last, because the calling process dies with that rank.
    """
    for rank in sorted(ranks, key=lambda rank: rank.pid == last):
        rank.send(signal.SIGKILL)


def innermost(stacks: str) -> list[str]:
    """Return the innermost calls of the main thread, from the last answer to MAIN_STACK in `stacks`.

    An earlier one may be there because somebody else sent that signal. Returns [] without an answer.
    """
    _, head, text = stacks.rpartition(MAIN_HEAD)
    lines = (head + text).split("hread 0x")[0].splitlines() if head else []
    return [line for line in lines if line.startswith((MAIN_HEAD, "  "))][:TAIL_LINES]


def _started(pid: int) -> str:
    """Return the start time of a process; an empty string if the process no longer exists."""
    stat = stat_of(pid)
    return "" if stat is None else stat.started


def _moved(task: str) -> int:
    """Return the number of bytes that a task has read and written, including mapped files.

    task: the path of the task in /proc. Returns 0 if the system does not report the numbers.
    """
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{task}/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))
    return 0
