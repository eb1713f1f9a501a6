"""Reads device and host memory at the same points of every step, and warns if they keep growing.

A run that puts an engine to sleep and wakes it thousands of times can die of a leak that no single
step shows. So memory is read once per step in each phase of the engine ("awake", "asleep") and
compared with earlier readings in the same phase. A cycle is one step. Each pair of readings gives a
rate: the difference between the two readings, divided by the number of cycles between them. The
slope is the median of these rates (Theil 1950, Sen 1968). Neither an outlier nor a single jump
changes the slope much. A slope counts as a leak only if the later reading is the larger one in most
pairs.

All sizes are in bytes. Host memory is also watched in runs on CPUs. A reading of host memory reads
one file in /proc per process.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import psutil
import torch

from mrl.types import Max, Statistics

WINDOW = 32
"""Number of the most recent cycles whose readings are used."""
MIN_CYCLES = 8
WARN_CYCLES = 24
"""Minimum number of readings of a series before it can cause a warning. In the first 20 steps, the
memory that the allocator keeps may grow in each step that has the largest micro-batch so far: with
SmolLM2-135M by up to 35 MiB a step."""
WARM_UP_CYCLES = 2
"""Number of initial cycles whose readings are ignored. In these cycles caches fill, kernels are
compiled and Adam allocates its moments."""
BOUND_BYTES = 4 << 20
"""Slope in bytes per cycle above which a leak is reported. Such a leak is 4 GiB in 1,000 steps."""
RISING_SHARE = 0.8
"""A slope counts as a leak only if the later reading is the larger one in at least this share of
the pairs. With noise around a constant level, the later reading is larger in half of the pairs."""

DEVICE = "device_used"
TRAINER = "trainer_rss"
ENGINE = "engine_rss"
ADVICE = {
    DEVICE: "memory/PHASE/engine_device_bytes is the engine's part; report it with the SGLang version",
    TRAINER: "check what reward functions and callbacks keep from step to step",
    ENGINE: "lower rollout.max_total_tokens, or save and start again before the host is full",
}


@dataclass(frozen=True)
class Leak:
    """A kind of memory whose readings in one phase keep growing."""

    phase: str
    kind: str
    """The memory that grows: `device_used` (memory of the rank's GPU in use by any process),
    `trainer_rss` (the rank's resident host memory) or `engine_rss` (the resident host memory of the
    engine's processes)."""
    bytes_per_cycle: float
    num_cycles: int

    def text(self) -> str:
        """Describe the leak in one line for the user, with advice."""
        return (
            f"memory leak? {self.kind} at phase {self.phase!r} grew by "
            f"{self.bytes_per_cycle / 2**20:.1f} MiB per step over the last {self.num_cycles} steps; "
            f"{ADVICE.get(self.kind, '').replace('PHASE', self.phase)}"
        )


def leak_slope(readings: Collection[float]) -> float:
    """Return the slope of a series of readings in bytes per cycle.

    The slope is 0 if there are fewer than MIN_CYCLES readings, or if the later reading is the larger
    one in fewer than RISING_SHARE of the pairs.
    """
    num = len(readings)
    if num < MIN_CYCLES:
        return 0.0
    values = np.fromiter(readings, np.float64, num)
    first, second = _pairs(num)
    slopes = (values[second] - values[first]) / (second - first)
    if (slopes > 0).mean() < RISING_SHARE:
        return 0.0
    return float(np.median(slopes))


@cache
def _pairs(num: int) -> tuple[np.ndarray, ...]:
    return np.triu_indices(num, 1)


class ProcessTree:
    """Reads the resident bytes of a process and its descendants.

    The descendants are looked up at the first reading, and again after one of the processes has
    exited.
    """

    def __init__(self) -> None:
        self._root: int | None = None
        self._processes: list[psutil.Process] = []

    def rss(self, pid: int | None) -> float:
        """Return the sum of the resident bytes of `pid` and its descendants.

        A page that several processes share is counted once for each process. The result is 0 if
        `pid` is None or the process no longer exists.
        """
        if pid is None:
            return 0.0
        if pid != self._root or not self._processes:
            self._look_up(pid)
        try:
            return self._sum()
        except psutil.Error:
            self._look_up(pid)
        with contextlib.suppress(psutil.Error):
            return self._sum()
        return 0.0

    def _sum(self) -> float:
        return float(sum(process.memory_info().rss for process in self._processes))

    def _look_up(self, pid: int) -> None:
        self._root, self._processes = pid, []
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            self._processes = [root, *root.children(recursive=True)]


@dataclass
class MemoryWatch:
    """Watches the memory of one rank.

    In each step, call `read()` once per phase, and then `metrics()` once.
    """

    device: torch.device
    warn: Callable[[str], None]
    """Called once, with a line of text, for each series of at least WARN_CYCLES readings that grows
    faster than `bound_bytes`."""
    bound_bytes: float = BOUND_BYTES
    _series: dict[tuple[str, str], deque[float]] = field(default_factory=dict)
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _reported: set[tuple[str, str]] = field(default_factory=set)
    _latest: dict[str, float] = field(default_factory=dict)
    _engine_pid: int | None = None
    _engine: ProcessTree = field(default_factory=ProcessTree)
    _trainer: psutil.Process = field(default_factory=psutil.Process)

    def read(self, phase: str, engine_pid: int | None = None) -> None:
        """Record the memory that is in use now, as readings of `phase`.

        `engine_pid` is the PID of the engine's server process, or None on a rank that has not started
        one. When it changes, a new series begins for the engine.
        """
        if engine_pid != self._engine_pid:
            self._engine_pid = engine_pid
            for key in [key for key in self._counts if key[1] == ENGINE]:
                self._counts.pop(key)
                self._series.pop(key, None)
        trainer, engine = float(self._trainer.memory_info().rss), self._engine.rss(engine_pid)
        self._latest["memory/trainer_rss_bytes"] = trainer
        readings = {TRAINER: trainer}
        if engine_pid is not None:
            self._latest["memory/engine_rss_bytes"] = engine
            readings[ENGINE] = engine
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            used = float(total - free)
            readings[DEVICE] = used
            own = torch.cuda.memory_reserved(self.device)
            self._latest[f"memory/{phase}/device_used_bytes"] = used
            self._latest[f"memory/{phase}/engine_device_bytes"] = used - own
        self.add(phase, readings)

    def add(self, phase: str, readings: Mapping[str, float]) -> None:
        """Add the readings that were made in `phase` of one step.

        `readings` holds bytes by kind of memory. The first WARM_UP_CYCLES readings of a kind in a phase
        are ignored.
        """
        for kind, value in readings.items():
            key = (phase, kind)
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._counts[key] > WARM_UP_CYCLES:
                self._series.setdefault(key, deque(maxlen=WINDOW)).append(value)

    def leaks(self) -> list[Leak]:
        """Return all series of readings that grow, the one with the largest slope first.

        Series whose slope is below `bound_bytes` are included.
        """
        found = [
            Leak(phase, kind, slope, len(series))
            for (phase, kind), series in self._series.items()
            if (slope := leak_slope(series)) > 0
        ]
        return sorted(found, key=lambda leak: -leak.bytes_per_cycle)

    def metrics(self) -> Statistics:
        """Return the metrics of the step, for `reduce_statistics`, and warn of new leaks."""
        leaks = self.leaks()
        for leak in leaks:
            key = (leak.phase, leak.kind)
            grows = leak.num_cycles >= WARN_CYCLES and leak.bytes_per_cycle > self.bound_bytes
            if grows and key not in self._reported:
                self._reported.add(key)
                self.warn(leak.text())
        values = {
            **self._latest,
            "memory/leak_bytes_per_cycle": leaks[0].bytes_per_cycle if leaks else 0.0,
        }
        self._latest = {}
        return {key: Max(torch.tensor(value, dtype=torch.float64)) for key, value in values.items()}
