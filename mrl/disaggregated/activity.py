"""This module accounts the wall-clock time of one worker to what it does.

The worker's main thread says what it begins; another thread takes what has come together and sends it.
Ages count back from the moment of the report, so that the clocks of two machines need not agree.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mrl.run.activities import ACTIVITIES

MAX_SPANS = 256
"""Spans of one report; the oldest are left out first, and the seconds count them all the same."""
SHORTEST_S = 0.05
"""No more than one report in this time, however often the activity changes."""


class ActivityLog:
    """Keeps one activity at a time, and the seconds and spans of those that ended."""

    def __init__(self, first: str, now: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._now, self._activity, self._since = now, first, now()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._spans: deque[tuple[float, float, str]] = deque(maxlen=MAX_SPANS)

    def enter(self, activity: str) -> None:
        """Begin an activity, which ends the one before. Raises ValueError for an unknown one."""
        if activity not in ACTIVITIES:
            raise ValueError(f"got the activity {activity!r}, expected one of {list(ACTIVITIES)}")
        with self._lock:
            if activity != self._activity:
                self._close()
                self._activity = activity
                self._changed.set()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Enter an activity for a block, and then the one before it again."""
        former = self._activity
        self.enter(activity)
        try:
            yield
        finally:
            self.enter(former)

    def take(self) -> dict[str, Any]:
        """Return what was done since the last call, JSON-able, and begin anew.

        `now` is the activity; `seconds` has the seconds by activity; `spans` has (age of its begin, age
        of its end, activity) of each span, ages in seconds, the oldest first.
        """
        with self._lock:
            self._close()
            at = self._since
            spans = [(at - begin, at - end, name) for begin, end, name in self._spans]
            seconds = dict(self._seconds)
            self._spans.clear()
            self._seconds.clear()
            return {"now": self._activity, "seconds": seconds, "spans": spans}

    def wait(self, limit_s: float) -> None:
        """Wait until the activity changes, at most `limit_s` seconds."""
        time.sleep(min(SHORTEST_S, limit_s))
        self._changed.wait(limit_s)
        self._changed.clear()

    def _close(self) -> None:
        now = self._now()
        if now > self._since:
            self._seconds[self._activity] += now - self._since
            self._spans.append((self._since, now, self._activity))
        self._since = now
