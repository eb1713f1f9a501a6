"""A limit on the wall-clock seconds that the rewards and environments of a step may use."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mrl.errors import RunFailed


class Budget:
    """A limit on the wall-clock time that calls of rewards and environments may take in a step.
    Thread-safe.

    The time of calls that run concurrently is counted only once.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        self.limit_s = limit_s
        """Seconds per step; infinity means that there is no limit."""
        self._spent_s, self._since, self._running = 0.0, 0.0, 0
        self._counting = threading.Lock()

    def begin_step(self) -> None:
        """Set the seconds used in the step to 0."""
        with self._counting:
            self._spent_s, self._since = 0.0, time.monotonic()

    @contextmanager
    def spending(self, timeout_s: float) -> Iterator[float]:
        """Count the time of the `with` block. Yields the seconds that a call in the block may take.

        The call may take `timeout_s` seconds, or fewer if less time is left of the step's limit.
        Raises RunFailed if no time is left.
        """
        left_s = self.enter()
        try:
            yield min(timeout_s, left_s)
        finally:
            self.leave()

    def enter(self) -> float:
        """Begin to count the time of a call, until `leave`. Return the seconds that are left of the
        step's limit. Raises RunFailed if no time is left; `leave` must not be called then."""
        with self._counting:
            now = time.monotonic()
            self._since = self._since if self._running else now
            left_s = self.limit_s - self._spent_s - (now - self._since)
            if left_s <= 0:
                raise RunFailed(
                    f"rewards and environments have used the {self.limit_s:g} s per step that the "
                    "service allows (tenants.max_reward_s); make them faster, or take fewer "
                    "samples per step"
                )
            self._running += 1
            return left_s

    def leave(self) -> None:
        """Record that a call has ended."""
        with self._counting:
            self._running -= 1
            if not self._running:
                self._spent_s += time.monotonic() - self._since
