"""This module knows which workers live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Worker:
    """Is a living worker: one engine with its scoring."""

    incarnation: int
    """A worker that is started again has a higher one."""
    last_seen: float


class Members:
    """Keeps the living workers by the number of their engine. `now` is an argument, in seconds."""

    def __init__(self) -> None:
        self._living: dict[int, Worker] = {}
        self._newest: dict[int, int] = {}

    def __contains__(self, worker: int) -> bool:
        return worker in self._living

    @property
    def living(self) -> dict[int, Worker]:
        return dict(self._living)

    def is_outdated(self, worker: int, incarnation: int) -> bool:
        """Whether a newer incarnation has joined already."""
        return incarnation < self._newest.get(worker, incarnation)

    def has(self, worker: int, incarnation: int) -> bool:
        """Whether this incarnation joined and was not lost since."""
        known = self._living.get(worker)
        return known is not None and known.incarnation == incarnation

    def add(self, worker: int, incarnation: int, now: float) -> None:
        self._newest[worker] = incarnation
        self._living[worker] = Worker(incarnation, now)

    def hear(self, worker: int, now: float) -> None:
        """Note that a living worker was heard of."""
        known = self._living[worker]
        known.last_seen = max(known.last_seen, now)

    def remove(self, worker: int) -> None:
        """Forget a worker, if it lives."""
        self._living.pop(worker, None)

    def late(self, now: float, limit_s: float) -> list[int]:
        """Return the workers that were not heard of for more than limit_s."""
        return [w for w, known in self._living.items() if now - known.last_seen > limit_s]
