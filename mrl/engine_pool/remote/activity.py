"""Records how much wall-clock time one worker spends on each activity, and when.

The worker's main thread reports each activity that it begins. Another thread sends the record to
the trainer. The record has ages instead of times of day, so that the clocks of the two machines
need not agree.
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
"""Maximum number of spans in a report. If there are more, the oldest spans are left out, but their
seconds are still counted."""
SHORTEST_S = 0.05
"""Minimum time between two reports, however often the activity changes."""


class ActivityLog:
    """Records the current activity, and the seconds and spans of all activities since the last
    report."""

    def __init__(self, first: str, now: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._now, self._activity, self._since = now, first, now()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._spans: deque[tuple[float, float, str]] = deque(maxlen=MAX_SPANS)

    def enter(self, activity: str) -> None:
        """End the current activity and begin another one. Raises ValueError for an unknown
        activity."""
        if activity not in ACTIVITIES:
            raise ValueError(f"got the activity {activity!r}, expected one of {list(ACTIVITIES)}")
        with self._lock:
            if activity != self._activity:
                self._close()
                self._activity = activity
                self._changed.set()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Record `activity` during a block, and then the activity that was current before the
        block."""
        former = self._activity
        self.enter(activity)
        try:
            yield
        finally:
            self.enter(former)

    def take(self) -> dict[str, Any]:
        """Return the record since the last call as a JSON-serializable dict, and clear it.

        `now` is the current activity. `seconds` maps activities to seconds. `spans` are tuples (age
        of the span's begin, age of its end, activity) with ages in seconds, the oldest span first.
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
        """Wait until the activity has changed, but at least SHORTEST_S and at most about `limit_s`
        seconds."""
        time.sleep(min(SHORTEST_S, limit_s))
        self._changed.wait(limit_s)
        self._changed.clear()

    def _close(self) -> None:
        now = self._now()
        if now > self._since:
            self._seconds[self._activity] += now - self._since
            self._spans.append((self._since, now, self._activity))
        self._since = now
