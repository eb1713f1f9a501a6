"""Reads device and host memory at the same moments of every step, and warns where they only grow.

A run that sleeps and wakes an engine thousands of times dies of a leak that no single step shows. So
each phase ("awake", "asleep") is read once a step and compared with itself: the slope is the
median over all pairs of readings of (difference / cycles between them) (Theil 1950, Sen 1968), which
neither one outlier nor a single step up moves. It counts as a leak where nearly all pairs rise, too.

Bytes everywhere. A cycle is one step. The host side works on CPUs as well; a reading costs one file
of /proc a process.
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
"""The number of newest cycles that count."""
MIN_CYCLES = 8
WARM_UP_CYCLES = 2
"""First cycles that are left out: caches fill, kernels are compiled, Adam makes its moments."""
BOUND_BYTES = 4 << 20
"""The slope above which a leak is reported: 1,000 steps of it are 4 GiB."""
RISING_SHARE = 0.8
"""Share of the pairs of readings that must rise; with noise around a level half of them do."""

DEVICE = "device_used"
TRAINER = "trainer_rss"
ENGINE = "engine_rss"
ADVICE = {
    DEVICE: "look at memory/PHASE/engine_device_bytes for whose it is, and report the SGLang version",
    TRAINER: "look for what a reward function or a callback keeps from step to step",
    ENGINE: "lower rollout.max_total_tokens, or save and start again before the host is full",
}


@dataclass(frozen=True)
class Leak:
    """A `Leak` is one series that grows."""

    phase: str
    kind: str
    """`device_used`, `trainer_rss` or `engine_rss`."""
    bytes_per_cycle: float
    num_cycles: int

    def text(self) -> str:
        """Return one line for the user."""
        return (
            f"memory leak? {self.kind} at phase {self.phase!r} grew by "
            f"{self.bytes_per_cycle / 2**20:.1f} MiB a step over the last {self.num_cycles} steps; "
            f"{ADVICE.get(self.kind, '').replace('PHASE', self.phase)}"
        )


def leak_slope(readings: Collection[float]) -> float:
    """Return the bytes per cycle by which a series grows; 0 if it is short, level, or goes both
    ways."""
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
    """Reads the resident bytes of a process and its descendants, looked up anew when one is gone."""

    def __init__(self) -> None:
        self._root: int | None = None
        self._processes: list[psutil.Process] = []

    def rss(self, pid: int | None) -> float:
        """Return the sum over the tree of `pid`, with shared pages counted by each; 0 without a
        process."""
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
    """Watches the memory of one rank: `read()` once in each phase of a step, then `metrics()` once."""

    device: torch.device
    warn: Callable[[str], None]
    """Is called once for each series that leaks."""
    bound_bytes: float = BOUND_BYTES
    _series: dict[tuple[str, str], deque[float]] = field(default_factory=dict)
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _told: set[tuple[str, str]] = field(default_factory=set)
    _latest: dict[str, float] = field(default_factory=dict)
    _engine_pid: int | None = None
    _engine: ProcessTree = field(default_factory=ProcessTree)
    _trainer: psutil.Process = field(default_factory=psutil.Process)

    def read(self, phase: str, engine_pid: int | None = None) -> None:
        """Note what is in use now.

        `engine_pid` is the engine's server, None on a rank that leads none; another one than before
        starts its series anew.
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
        """Add one reading of a cycle: bytes by kind."""
        for kind, value in readings.items():
            key = (phase, kind)
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._counts[key] > WARM_UP_CYCLES:
                self._series.setdefault(key, deque(maxlen=WINDOW)).append(value)

    def leaks(self) -> list[Leak]:
        """Return the series that grow, above the bound or not, largest first."""
        found = [
            Leak(phase, kind, slope, len(series))
            for (phase, kind), series in self._series.items()
            if (slope := leak_slope(series)) > 0
        ]
        return sorted(found, key=lambda leak: -leak.bytes_per_cycle)

    def metrics(self) -> Statistics:
        """Return the metrics of the step that ends, for reduce_statistics. Warns once of each leak."""
        leaks = self.leaks()
        for leak in leaks:
            key = (leak.phase, leak.kind)
            if leak.bytes_per_cycle > self.bound_bytes and key not in self._told:
                self._told.add(key)
                self.warn(leak.text())
        values = {
            **self._latest,
            "memory/leak_bytes_per_cycle": leaks[0].bytes_per_cycle if leaks else 0.0,
        }
        self._latest = {}
        return {key: Max(torch.tensor(value, dtype=torch.float64)) for key, value in values.items()}
