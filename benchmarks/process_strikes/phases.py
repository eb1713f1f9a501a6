"""Tells which phase a job is in: from outside, by the page that the watchdog reads, too."""

from __future__ import annotations

import mmap
import os
import time
from contextlib import suppress
from pathlib import Path

from mrl.drill.job import Job, Unexpected
from mrl.system import heartbeat

MEETING = "meeting"
"""Before the ranks have met: no page is there yet, and nothing watches."""
START = "start"
EARLY = (MEETING, START)
ENDING = "end"
"""A rank is through with the run: it closes what it has opened, and is not watched any more."""
PHASES = {
    START: ("start", "load"),
    "sync": ("sync",),
    "rollout": ("rollout",),
    "train": ("logprobs", "train"),
    "save": ("save",),
    ENDING: (heartbeat.LEFT,),
}
"""The phases of the table, and those of the watchdog that belong to each."""
POLL_S, EARLY_POLL_S = 0.001, 0.1
"""How often to look: before there is a page, a look goes through all processes of the machine."""
PAGE = "mrl-heartbeat"


class Phase:
    """Reads the phase of rank 0 of one start."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._page: mmap.mmap | None = None

    def now(self) -> str:
        """Return the phase of the watchdog, or `meeting`."""
        if self._page is None:
            self._page = _page_of(self.job)
        return MEETING if self._page is None else heartbeat.read_page(self._page).phase

    def wait(self, phase: str) -> None:
        """Wait until rank 0 comes into a phase of the table. Raises Unexpected."""
        if phase in EARLY:
            wanted = (MEETING,) if phase == MEETING else PHASES[START]
        else:
            wanted = PHASES[phase]
            self.job.wait(lambda: self._is_other(wanted), f"another phase than {phase}")
        self._until(wanted, phase)

    def _is_other(self, wanted: tuple[str, ...]) -> bool:
        return self.now() not in wanted

    def _until(self, wanted: tuple[str, ...], phase: str) -> None:
        deadline = time.monotonic() + self.job.limit_s
        while self.now() not in wanted:
            if self.job.process.poll() is not None:
                raise Unexpected(f"ended before phase {phase}; see {self.job.log}")
            if time.monotonic() > deadline:
                raise Unexpected(f"{self.job.limit_s:.0f} s without phase {phase}")
            time.sleep(EARLY_POLL_S if self._page is None else POLL_S)


def _page_of(job: Job) -> mmap.mmap | None:
    """Return the page of rank 0, mapped; None where it has none yet."""
    ranks = job.ranks()
    for file in Path(f"/proc/{ranks[0].pid}/fd").iterdir() if ranks else ():
        with suppress(OSError):
            if PAGE in os.readlink(file):
                descriptor = os.open(file, os.O_RDONLY)
                try:
                    return mmap.mmap(descriptor, heartbeat.SIZE, prot=mmap.PROT_READ)
                finally:
                    os.close(descriptor)
    return None
