"""Finds the ranks of a run by their heartbeats, and stops one in a phase."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from mrl.system.heartbeat import SIZE, Pulse, read_page


@dataclass
class Rank:
    """A rank that is watched."""

    pid: int
    page: mmap.mmap

    def pulse(self) -> Pulse:
        return read_page(self.page)

    def is_stopped(self) -> bool:
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] in "Tt"


def ranks_of(root: int) -> list[Rank]:
    """Return the watched processes below `root`, in the order in which they were started."""
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(root).children(recursive=True)
        return [Rank(p.pid, page) for p in sorted(below, key=_age) for page in page_of(p.pid)]
    return []


def _age(process: psutil.Process) -> tuple[float, int]:
    return process.create_time(), process.pid


def page_of(pid: int) -> Iterator[mmap.mmap]:
    """Give the heartbeat page of a process, where it has one."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(entry).startswith("/memfd:mrl-heartbeat"):
                descriptor = os.open(entry, os.O_RDONLY)
                yield mmap.mmap(descriptor, SIZE, access=mmap.ACCESS_READ)
                os.close(descriptor)
                return


def stop_in(
    rank: Rank, phase: str, least_step: int, delay_s: float, limit_s: float
) -> Pulse | None:
    """Stop a rank `delay_s` after it comes into `phase`; return where it stands then, or None where
    it never did. One that has left the phase until the signal reached it goes on and is tried again."""
    deadline = time.monotonic() + limit_s
    with suppress(ProcessLookupError, FileNotFoundError):
        while time.monotonic() < deadline:
            pulse = rank.pulse()
            if pulse.phase != phase or pulse.step < least_step:
                os.kill(rank.pid, 0)
                time.sleep(0.001)
                continue
            time.sleep(delay_s)
            delay_s /= 2
            os.kill(rank.pid, signal.SIGSTOP)
            while not rank.is_stopped():
                time.sleep(0.001)
            pulse = rank.pulse()
            if pulse.phase == phase:
                return pulse
            os.kill(rank.pid, signal.SIGCONT)
    return None
