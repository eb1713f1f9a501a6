"""Limits the wall seconds in which the rewards and environments of a step may be at work."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mrl.errors import RunFailed


class Budget:
    """A `Budget` is a number of wall seconds; calls that run at once count once. For any thread."""

    def __init__(self, limit_s: float = math.inf) -> None:
        self.limit_s = limit_s
        """Seconds for a step; infinity sets no limit."""
        self._spent_s, self._since, self._running = 0.0, 0.0, 0
        self._counting = threading.Lock()

    def begin_step(self) -> None:
        """Count from 0 again."""
        with self._counting:
            self._spent_s, self._since = 0.0, time.monotonic()

    @contextmanager
    def spending(self, timeout_s: float) -> Iterator[float]:
        """Count the block, and give the seconds that the call in it may take, at most `timeout_s`.

        Raises RunFailed where nothing is left.
        """
        with self._counting:
            now = time.monotonic()
            self._since = self._since if self._running else now
            left_s = self.limit_s - self._spent_s - (now - self._since)
            if left_s <= 0:
                raise RunFailed(
                    f"rewards and environments have worked for {self.limit_s:g} s in this step, all "
                    "that the service allows (tenants.max_reward_s); make them faster, or take fewer "
                    "samples a step"
                )
            self._running += 1
        try:
            yield min(timeout_s, left_s)
        finally:
            with self._counting:
                self._running -= 1
                if not self._running:
                    self._spent_s += time.monotonic() - self._since
