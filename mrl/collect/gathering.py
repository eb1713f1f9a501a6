"""Decides how long turns that are ready wait for others, so that the engine gets them as one batch.

Turns become ready in bursts: turns of equal length end together, and their environments answer one
after another. If each turn were sent alone, the engine would interrupt its work for each of them. What
an interruption costs is about what a step of the engine takes, so waits are measured in such steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

GAP = 0.25
"""A burst is over when nothing became ready for this many steps of the engine."""
MOST = 4.0
"""The most steps of the engine that a turn waits for others."""
FIRST_STEP_S = 0.02
"""Seconds that a step of the engine is assumed to take before any was measured."""
NEW_SHARE = 0.1
"""The share of a new measurement in the running mean."""


class Gathering:
    """The turns of a rollout that are ready to be generated."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step_s = FIRST_STEP_S
        """A running mean of the seconds that the engine takes for a token of one request."""
        self._first_at = self._last_at = 0.0
        """When the first and the last of the turns that are ready now became ready."""
        self._num_ready = 0

    def note_turn(self, seconds: float, num_tokens: int) -> None:
        """Record how long the engine took for a turn of so many tokens. Any thread may call this."""
        self._step_s += NEW_SHARE * (seconds / max(num_tokens, 1) - self._step_s)

    def note_ready(self) -> None:
        """Record that one more turn is ready."""
        self._last_at = self._clock()
        if not self._num_ready:
            self._first_at = self._last_at
        self._num_ready += 1

    def wait_s(self, num_live: int) -> float:
        """Return how many seconds the turns that are ready should still wait for others. If it is 0,
        they must be sent now.

        `num_live` is the number of episodes that have not ended. Nothing is left to wait for if all of
        them are ready.
        """
        now = self._clock()
        left_s = min(self._last_at + GAP * self._step_s, self._first_at + MOST * self._step_s) - now
        if self._num_ready < num_live and left_s > 0:
            return left_s
        self._num_ready = 0
        return 0.0
