"""Measures the wall-clock seconds of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.profiler import record_function


@dataclass
class Clock:
    """Adds up wall-clock seconds by the name of the part that they were spent in."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with record_function(f"mrl: {name}"):  # in the trace of a profiled step
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
