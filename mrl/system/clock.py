"""Measures the wall-clock seconds of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.profiler import record_function


@dataclass
class Clock:
    """Adds up the wall-clock seconds of each part of a step, such as `rollout`."""

    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[float, float, str]] = field(default_factory=list)
    """(begin, end, name) of each part that is not inside another part. `begin` and `end` are in seconds
    since 1970."""
    _inner_s: float | None = None
    """Seconds of the parts that ended inside the current part; None outside of all parts."""
    _start: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self._start

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the `with` block as the part `name`.

        Parts may be nested. The time of an inner part does not count for the outer one, so that the
        parts add up to the time that passed. An exception that leaves the block gets the attribute
        `phase`, the name of the innermost part, for the report of the failure.
        """
        start, began, outer_s = time.perf_counter(), time.time(), self._inner_s
        self._inner_s = 0.0
        try:
            with record_function(f"mrl: {name}"):  # for the trace of a profiled step
                yield
        except Exception as error:
            if not hasattr(error, "phase"):  # keep the name of the innermost part
                setattr(error, "phase", name)  # noqa: B010
            raise
        finally:
            seconds = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds - self._inner_s
            self._inner_s = None if outer_s is None else outer_s + seconds
            if outer_s is None:
                self.spans.append((began, began + seconds, name))
