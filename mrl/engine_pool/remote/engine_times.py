"""Records the activities of every engine on the trainer's clock.

Workers report time spans as ages. While an engine has no worker, its activity is `start`, because
another worker is starting. The time since an engine's last report, up to GUESS_S seconds, is
attributed to the activity named in that report. The next report replaces this guess.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mrl.run.activities import ACTIVITIES, seconds_key

GUESS_S = 2.0
MAX_SPANS = 4000
"""Maximum number of spans that `take_spans` returns for all engines together; the shortest spans
are dropped."""
_MERGED_S = 0.25
"""Two spans of the same activity are joined if the gap between them is shorter than this many
seconds, because message delays cause small gaps."""


class Span(NamedTuple):
    """A time span in which an engine had one activity."""

    begin: float
    """The start of the time span, in seconds since 1970; `end` is its end, in the same unit."""
    end: float
    activity: str


@dataclass
class _Engine:
    """The record of one engine."""

    heard: float
    """The time of the last report, in seconds since 1970."""
    activity: str = "start"
    """The activity since the last report."""
    is_absent: bool = True
    """Whether the engine has no worker."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by activity, up to the last report."""
    counted: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by activity that `take_seconds` has returned already."""
    spans: list[Span] = field(default_factory=list)
    drawn: float = 0.0
    """The end of the last span, in seconds since 1970. Because message delays vary, the next span may
    seem to begin earlier; it is then cut to begin at this time."""

    def so_far(self, now: float) -> dict[str, float]:
        """Return the seconds of each activity until `now`. The time since the last report is
        counted for the activity of that report, which is a guess."""
        ahead = now - self.heard
        going_on = ahead if self.is_absent else min(ahead, GUESS_S)
        return {**self.seconds, self.activity: self.seconds[self.activity] + going_on}

    def add(self, span: Span) -> None:
        """Add a span that is later than all spans so far."""
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
    """Keeps the activities of all engines. Any thread may call the methods."""

    def __init__(self, engines: Iterable[int], now: Callable[[], float] = time.time) -> None:
        """`engines` are the numbers of the engines."""
        self._now, self._lock = now, threading.Lock()
        self._floor = now()
        """The time, in seconds since 1970, from which on activities are counted. Anything earlier is
        ignored."""
        self._engines = {number: _Engine(self._floor) for number in engines}
        self._left: dict[int, list[Span]] = {}
        """The spans of engines that were removed, until `take_spans` returns them."""

    def add(self, number: int) -> None:
        """Record the activities of an engine from now on."""
        with self._lock:
            self._engines.setdefault(number, _Engine(self._now()))

    def remove(self, number: int) -> None:
        """Record no further activities of an engine. Harmless when repeated."""
        with self._lock:
            if (engine := self._engines.pop(number, None)) is not None and engine.spans:
                self._left[number] = engine.spans

    def activity(self, number: int) -> str:
        """Return the current activity of an engine; empty if it has no record."""
        with self._lock:
            engine = self._engines.get(number)
            return "" if engine is None else engine.activity

    def restart(self) -> None:
        """Forget all activities before now. Called when the engines have started."""
        with self._lock:
            self._floor = self._now()
            for engine in self._engines.values():
                engine.heard = self._floor
                engine.seconds.clear()
                engine.counted.clear()
                engine.spans.clear()

    def lose(self, number: int) -> None:
        """Record that the worker of an engine is lost. From its last report on, the engine's
        activity is `start`."""
        with self._lock:
            if (engine := self._engines.get(number)) is not None:
                engine.is_absent, engine.activity = True, "start"

    def report(self, number: int, message: Mapping[str, Any], *, is_lost: bool = False) -> None:
        """Add a worker's report, which is a result of `ActivityLog.take`. The report of a lost
        worker, or of an engine without a record, is only checked.

        Raises ValueError, KeyError or TypeError for an invalid report.
        """
        named = {message["now"], *message["seconds"], *(each[2] for each in message["spans"])}
        if unknown := named - set(ACTIVITIES):
            raise ValueError(
                f"got the activities {sorted(unknown)}, expected some of {list(ACTIVITIES)}"
            )
        seconds = {name: float(value) for name, value in message["seconds"].items()}
        spans = [(float(oldest), float(newest), name) for oldest, newest, name in message["spans"]]
        if is_lost:
            return
        with self._lock:
            if (engine := self._engines.get(number)) is not None:
                self._add(engine, seconds, spans)
                engine.activity = message["now"]

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
        if begin >= floor:  # the report has all seconds, but not all spans
            for name, value in seconds.items():
                engine.seconds[name] += value - known[name]
        engine.heard, engine.is_absent = now, False
        most = self._most(len(self._engines))
        if len(engine.spans) > 4 * most:
            engine.spans = _longest(engine.spans, 2 * most)

    def take_seconds(self) -> dict[str, float]:
        """Return `time/engine_*`: the seconds of each activity since the last call, averaged over
        the engines that have a record now."""
        sums = dict.fromkeys(ACTIVITIES, 0.0)
        with self._lock:
            now = self._now()
            for engine in self._engines.values():
                for name, seconds in engine.so_far(now).items():
                    new = max(0.0, seconds - engine.counted[name])
                    sums[name] += new
                    engine.counted[name] += new
            num_engines = max(1, len(self._engines))
        return {seconds_key(name): total / num_engines for name, total in sums.items()}

    def take_spans(self) -> list[list[Span]]:
        """Return, for each engine by number, the spans reported since the last call, in order of
        time. A number without an engine has none."""
        with self._lock:
            spans = {**self._left, **{n: engine.spans for n, engine in self._engines.items()}}
            self._left = {}
            for engine in self._engines.values():
                engine.spans = []
        most = self._most(len(spans))
        found: list[list[Span]] = [[] for _ in range(max(spans, default=-1) + 1)]
        for number, each in spans.items():
            found[number] = _longest(each, most)
        return found

    @staticmethod
    def _most(num_engines: int) -> int:
        """Return the maximum number of spans that `take_spans` returns for one engine."""
        return max(8, MAX_SPANS // max(1, num_engines))


def _longest(spans: list[Span], most: int) -> list[Span]:
    kept = heapq.nlargest(most, spans, key=lambda span: span.end - span.begin)
    return sorted(kept) if len(kept) < len(spans) else spans
