"""A rank as the monitor of its node sees it: its page, its state in /proc, its stacks."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mrl.run.failure import TAIL_LINES
from mrl.system.heartbeat import SIZE, kind_of, read_collective, read_page, read_writer
from mrl.system.proc import stat_of
from mrl.watch.verdict import GONE, Seen

TICK_S = 0.2
STACKS_S = 2.0
"""How long the ranks have to write their stacks."""
MOVES_BYTES = ("load", "save")
"""Phases in which reading and writing files is progress; in others a waiting rank may read as well."""
BEAT_BYTES = 1 << 16
"""The bytes that count as one sign of progress, more than polling a file reads."""

NO_FILE = -1


@dataclass
class Process:
    """A `Process` is a rank on this node."""

    rank: int
    pid: int
    page: mmap.mmap
    stacks: int
    """The descriptor of the file that faulthandler writes to."""
    started: str
    """When it was started, by which it is told from a later process with its number."""

    @classmethod
    def open(cls, rank: int, pid: int, page: str, stacks: str) -> Process:
        """Open the files of a rank. A rank that is ending may have closed them, or have others under
        their numbers: without its page nothing is known of it."""
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

    def see(self) -> Seen:
        stat = stat_of(self.pid)
        state = stat.state if stat is not None and stat.started == self.started else ""
        pulse = read_page(self.page)
        if kind_of(pulse.phase) in MOVES_BYTES and state:
            moved = _moved(f"{self.pid}/task/{self.pid}")
            pid = read_writer(self.page)
            writer = stat_of(pid) if pid else None
            if writer is not None and writer.parent == self.pid:
                moved += _moved(str(pid))
                state = writer.state if writer.is_stopped else state  # the rank may wait for it
            pulse = pulse._replace(beats=pulse.beats + moved // BEAT_BYTES)
        return Seen(pulse, state, read_collective(self.page))

    def send(self, number: int) -> None:
        """Send it a signal, where it is still there."""
        with suppress(ProcessLookupError):
            if _started(self.pid) == self.started:
                os.kill(self.pid, number)

    def read_stacks(self) -> str:
        with suppress(OSError):
            size = os.fstat(self.stacks).st_size
            return os.pread(self.stacks, size, 0).decode(errors="replace")
        return ""


def stacks_of(ranks: Iterable[Process]) -> dict[int, str]:
    """Let every rank write the stacks of its threads, also a stopped one; return them by rank."""
    ranks = list(ranks)
    waiting = [rank for rank in ranks if rank.see().state not in GONE]
    for rank in waiting:
        rank.send(signal.SIGUSR2)
        rank.send(signal.SIGCONT)  # the handler runs before anything else
    deadline = time.monotonic() + STACKS_S
    sizes: dict[int, int] = {}
    while waiting and time.monotonic() < deadline:
        time.sleep(TICK_S)
        before, sizes = sizes, {rank.rank: len(rank.read_stacks()) for rank in waiting}
        # the main thread comes last: until nothing is added
        waiting = [r for r in waiting if not sizes[r.rank] or sizes[r.rank] != before.get(r.rank)]
    return {rank.rank: text for rank in ranks if (text := rank.read_stacks())}


def kill(ranks: Iterable[Process], last: int) -> None:
    """Kill ranks, the one with the process number `last` at the end: this process dies with it.
    Engines and workers die with their rank."""
    for rank in sorted(ranks, key=lambda rank: rank.pid == last):
        rank.send(signal.SIGKILL)


def innermost(stacks: str) -> list[str]:
    """Return the innermost calls of the main thread, which faulthandler writes last."""
    lines = stacks.splitlines()
    heads = [i for i, line in enumerate(lines) if "hread 0x" in line]
    return [line for line in lines[heads[-1] :] if line.strip()][:TAIL_LINES] if heads else []


def _started(pid: int) -> str:
    """Return when a process was started; empty if it is gone."""
    stat = stat_of(pid)
    return "" if stat is None else stat.started


def _moved(task: str) -> int:
    """Return the bytes that a task of /proc has read and written, including mapped files; 0 if the
    system does not report them."""
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{task}/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))
    return 0
