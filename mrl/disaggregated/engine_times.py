"""This module knows what every engine did and when, by the trainer's clock.

Workers report spans as ages. Where an engine has no worker, it is `start` that goes on: another worker
is on its way. What goes on since the last report counts to the activity that it named, for at most
GUESS_S seconds, and the next report puts it right.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mrl.run.activities import ACTIVITIES, seconds_key

GUESS_S = 2.0
MAX_SPANS = 4000
"""Spans of all engines that are kept between two calls of `take_spans`; the longest of each stay."""
_MERGED_S = 0.25
"""A gap between two spans of one activity that is due to the way of the messages."""


class Span(NamedTuple):
    """A `Span` is a stretch of time that an engine spent in one activity."""

    begin: float
    """Seconds since 1970, as `end`."""
    end: float
    activity: str


@dataclass
class _Engine:
    """Holds what is known of one engine."""

    heard: float
    """The time up to which it is known what the engine did."""
    activity: str = "start"
    is_absent: bool = True
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counted: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The seconds that `take_seconds` has returned."""
    spans: list[Span] = field(default_factory=list)
    drawn: float = 0.0
    """The end of the last of its spans: messages are on their way for different times, and no two spans
    overlap."""

    def so_far(self, now: float) -> dict[str, float]:
        """Return the seconds by activity until `now`, as far as they are known or guessed."""
        ahead = now - self.heard
        going_on = ahead if self.is_absent else min(ahead, GUESS_S)
        return {**self.seconds, self.activity: self.seconds[self.activity] + going_on}

    def add(self, span: Span) -> None:
        """Add a span that follows on the others."""
        self.seconds[span.activity] += span.end - span.begin
        span = span._replace(begin=max(span.begin, self.drawn))
        if span.end <= span.begin:
            return
        self.drawn = span.end
        last = self.spans[-1] if self.spans else None
        if last and last.activity == span.activity and span.begin - last.end < _MERGED_S:
            self.spans[-1] = last._replace(end=span.end)
        else:
            self.spans.append(span)


class EngineTimes:
    """Keeps the activities of all engines. Threads may call it at any time."""

    def __init__(self, num_engines: int, now: Callable[[], float] = time.time) -> None:
        self._now, self._most = now, max(8, MAX_SPANS // num_engines)
        self._lock = threading.Lock()
        self._floor = now()
        """Nothing before it counts."""
        self._engines = [_Engine(self._floor) for _ in range(num_engines)]

    def restart(self) -> None:
        """Begin to count now: the engines have started."""
        with self._lock:
            self._floor = self._now()
            for engine in self._engines:
                engine.heard = self._floor
                engine.seconds.clear()
                engine.counted.clear()
                engine.spans.clear()

    def lose(self, number: int) -> None:
        """Note that an engine has no worker, since it was last heard of."""
        with self._lock:
            self._engines[number].is_absent, self._engines[number].activity = True, "start"

    def report(self, number: int, message: Mapping[str, Any], *, is_lost: bool = False) -> None:
        """Take in an `ActivityLog.take`; that of a worker that is lost counts for nothing.

        Raises ValueError, KeyError or TypeError for anything else.
        """
        named = {message["now"], *message["seconds"], *(each[2] for each in message["spans"])}
        if unknown := named - set(ACTIVITIES):
            raise ValueError(f"of the activities {sorted(unknown)}")
        seconds = {name: float(value) for name, value in message["seconds"].items()}
        spans = [(float(oldest), float(newest), name) for oldest, newest, name in message["spans"]]
        if is_lost:
            return
        with self._lock:
            self._add(self._engines[number], seconds, spans)
            self._engines[number].activity = message["now"]

    def _add(
        self, engine: _Engine, seconds: dict[str, float], spans: list[tuple[float, float, str]]
    ) -> None:
        now = self._now()
        begin = now - sum(seconds.values())
        floor = self._floor
        if engine.is_absent:
            floor = max(floor, engine.heard)
            if begin > floor:
                engine.add(Span(floor, begin, "start"))
        known: dict[str, float] = defaultdict(float)
        for oldest, newest, name in spans:
            span = Span(max(floor, now - oldest), now - newest, name)
            if span.end > span.begin:
                engine.add(span)
                known[name] += span.end - span.begin
        if begin >= floor:  # the spans that the report has left out count, too
            for name, value in seconds.items():
                engine.seconds[name] += value - known[name]
        engine.heard, engine.is_absent = now, False
        if len(engine.spans) > 4 * self._most:
            engine.spans = _longest(engine.spans, 2 * self._most)

    def take_seconds(self) -> dict[str, float]:
        """Return `time/engine_*` since the last call, mean over engines, for every activity."""
        sums = dict.fromkeys(ACTIVITIES, 0.0)
        with self._lock:
            now = self._now()
            for engine in self._engines:
                for name, seconds in engine.so_far(now).items():
                    new = max(0.0, seconds - engine.counted[name])
                    sums[name] += new
                    engine.counted[name] += new
        return {seconds_key(name): total / len(self._engines) for name, total in sums.items()}

    def take_spans(self) -> list[list[Span]]:
        """Return for each engine the spans that were reported since the last call, in their order."""
        with self._lock:
            found = [_longest(engine.spans, self._most) for engine in self._engines]
            for engine in self._engines:
                engine.spans = []
        return found


def _longest(spans: list[Span], most: int) -> list[Span]:
    kept = heapq.nlargest(most, spans, key=lambda span: span.end - span.begin)
    return sorted(kept) if len(kept) < len(spans) else spans
