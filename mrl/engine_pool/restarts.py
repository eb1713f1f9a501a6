"""Starts lost engines again, and limits how often an engine may be lost.

A worker of a rollout rank counts how often its engine was lost since the last finished batch or, if
the worker takes prompts one at a time (under leases), since the last finished group. In a colocated
run, the lost engines of all ranks in a step are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mrl.engines.base import EngineLost
from mrl.errors import EngineGone
from mrl.run import console
from mrl.system.heartbeat import beat

IN_BATCH = "engines were lost in one batch"
IN_STEP = "rollout engines were lost in one step"


@dataclass
class Restarts:
    """Remembers that an engine was lost until the engine is replaced, and limits how often engines
    may be lost.

    `count_lost` and `replace` are collectives if the losses of all ranks are counted together.
    """

    description: str
    """`IN_BATCH` or `IN_STEP`: the part of the error message that follows the number of lost
    engines."""
    max_restarts: int
    """How many times engines may be lost between two calls of `reset`."""
    engine_number: int | None
    """The number of the engine that this rank leads. None if another rank leads the engine; then
    that rank counts the engine's losses."""
    share_loss: Callable[[EngineLost | None], EngineLost | None] = lambda lost: lost
    """Takes the error that this rank has seen, or None. Returns the error with which the engine was
    lost, or None if the engine is not lost (see `EngineNodes.share_loss`)."""
    sum_up: Callable[[int], int] = int
    """Takes a number from each of the ranks whose losses are counted together, and returns the sum."""
    lost: EngineLost | None = None
    """The error with which the engine was lost; None while the engine runs."""
    num_counted: int = 0
    """How many times engines were lost since `reset`. A loss is not counted if it is explained
    (`EngineLost.is_explained`). An explained loss was caused by a known request, and this request
    is not tried again."""

    def reset(self) -> None:
        """Set the count of lost engines to 0, because a new step begins, or a batch or a group is
        finished."""
        self.num_counted = 0

    def count_lost(self) -> int:
        """Return how many engines of all ranks are lost now. Sets `lost` if another rank knows of a
        loss."""
        self.lost = self.share_loss(self.lost)
        return self.sum_up(self.engine_number is not None and self.lost is not None)

    def replace(self, start: Callable[[], None], num_lost: int = 1) -> int:
        """Start engines until no engine is lost; return how many were started on all ranks.

        `num_lost` is the result of `count_lost`. `start` is called on each rank whose `lost` is not
        None. If `start` raises a RuntimeError, the new engine counts as lost; an InputError is
        raised unchanged.

        Raises EngineGone if `num_counted` exceeds `max_restarts`. Losses that a known request
        caused do not count, because such a request is not tried again.
        """
        num_starts = 0
        while num_lost:
            num_starts += num_lost
            lost = self.lost
            is_explained = lost is not None and lost.is_explained
            num_explained = self.sum_up(self.engine_number is not None and is_explained)
            self.num_counted += num_lost - num_explained
            beat()  # the watchdog limits each start separately
            if self.num_counted > self.max_restarts:
                raise EngineGone(
                    f"{self.num_counted} {self.description}, more than "
                    f"rollout.max_restarts={self.max_restarts}; "
                    f"{lost or 'see the messages of other ranks'}"
                ) from None
            if lost is not None:
                self._start(start, lost)
            num_lost = self.count_lost()
        return num_starts

    def _start(self, start: Callable[[], None], lost: EngineLost) -> None:
        if self.engine_number is not None:
            console.warning(f"{lost}")
            console.warning(f"rollout engine {self.engine_number}: starting another one")
        self.lost = None
        try:
            start()
        except RuntimeError as error:
            self.lost = error if isinstance(error, EngineLost) else EngineLost(str(error))
