"""Paces a monitor. Its parent rank says over standard input that it has finished the run."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterator

from mrl.system.processes import outlive_parent
from mrl.watch.process import TICK_S

DONE = b"done\n"
"""The line with which the parent rank says that it has finished the run. If the input ends without
this line, the rank has failed."""
LAST_TICK_S = 0.05
"""Seconds between ticks after the parent rank has finished; short, as the other ranks finish soon."""


class Ticks:
    """Paces a monitor: yields a tick at regular intervals, until there is nothing more to watch."""

    def __init__(self) -> None:
        self.is_done = False
        """Whether the parent rank of the monitor has finished the run."""

    def until(self, all_have_left: Callable[[], bool]) -> Iterator[float]:
        """Yield at each tick the seconds since the last tick.

        The ticks end if the parent rank fails or, once it has finished the run, as soon as
        `all_have_left()` is true.
        """
        last = time.monotonic()
        poll = select.poll()
        poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
        while True:
            if self.is_done:
                time.sleep(LAST_TICK_S)
            elif poll.poll(TICK_S * 1000):
                if sys.stdin.buffer.readline() != DONE:
                    return
                self.is_done = True
                outlive_parent()
            if self.is_done and all_have_left():
                return
            now = time.monotonic()
            yield now - last
            last = now
