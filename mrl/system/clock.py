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
    """(begin, end, name) of each part that is not inside another part, in seconds since 1970."""
    _is_inside: bool = False
    _start: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self._start

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the `with` block as the part `name`.

        Parts may be nested. An exception that leaves the block gets the attribute `phase`, the name
        of the innermost part, for the report of the failure.
        """
        start, began, was_inside = time.perf_counter(), time.time(), self._is_inside
        self._is_inside = True
        try:
            with record_function(f"mrl: {name}"):  # for the trace of a profiled step
                yield
        except Exception as error:
            if not hasattr(error, "phase"):  # keep the name of the innermost part
                setattr(error, "phase", name)  # noqa: B010
            raise
        finally:
            seconds = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self._is_inside = was_inside
            if not was_inside:
                self.spans.append((began, began + seconds, name))
