"""The events of a page. One thread publishes them; the streams of any number of browsers read them.

Nothing is kept for a single browser. One that falls behind the last KEPT events, or that slept through
them, gets none of them: its page requests the whole state again.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

KEPT, KEPT_BYTES = 512, 16 << 20
"""The number of events that are kept for browsers that come back, and of their characters."""


class Event(NamedTuple):
    number: int
    kind: str
    data: str
    """JSON in one line."""


class Feed:
    """The newest events, numbered from 1. Thread-safe."""

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(4)
        """Distinguishes the numbers of this feed from those of another server's."""
        self.number = 0
        """The number of the newest event."""
        self.is_closed = False
        self.num_listeners = 0
        self._events: deque[Event] = deque()
        self._size = 0
        self._listeners: dict[int, Callable[[], object]] = {}
        self._next = 0
        self._lock = threading.Lock()

    def publish(self, kind: str, data: Any) -> None:
        """Add an event. `data` is JSON-able, without NaN and infinity."""
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
        with self._lock:
            self.number += 1
            self._events.append(Event(self.number, kind, text))
            self._size += len(text)
            while len(self._events) > KEPT or (self._size > KEPT_BYTES and len(self._events) > 1):
                self._size -= len(self._events.popleft().data)
        self._wake()

    def after(self, number: int) -> list[Event] | None:
        """Return the events after the one with this number; None if they are not all kept."""
        with self._lock:
            if number == self.number:
                return []
            first = self._events[0].number if self._events else self.number + 1
            if not first - 1 <= number <= self.number:
                return None
            return [event for event in self._events if event.number > number]

    def listen(self, wake: Callable[[], object]) -> Callable[[], None]:
        """Call `wake` after each event, from the publishing thread. Return the function that ends
        this."""
        with self._lock:
            self._next += 1
            place = self._next
            self._listeners[place] = wake
            self.num_listeners = len(self._listeners)

        def end() -> None:
            with self._lock:
                self._listeners.pop(place, None)
                self.num_listeners = len(self._listeners)

        return end

    def close(self) -> None:
        """End all streams."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            listeners = list(self._listeners.values())
        for wake in listeners:
            wake()
