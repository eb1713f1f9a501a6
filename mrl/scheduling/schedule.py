"""Schedules: they decide when workers receive weights, and which prompts they may lease.

A coordinator (mrl/engine_pool/remote/coordinator.py) does all input and output, and asks its
schedule what to do. With `FixedSchedule`, all engines generate the same steps. With `LeaseSchedule`
(mrl/engine_pool/remote/lease_schedule.py), each engine generates independently of the steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeVar


class Receiver(Protocol):
    """The properties of a worker that a schedule reads."""

    sent: int
    """The newest version of the weights that was sent to the worker; -1 for none."""
    can_receive: bool
    """Whether the worker has room for another version of the weights."""


R = TypeVar("R", bound=Receiver)
Message = tuple[int, dict[str, Any], bytes]
"""A message to a worker: (number of the worker's engine, message as a dict, binary body)."""


class Schedule(Protocol):
    """Decides when workers receive weights. It may also lease prompts to workers, in addition to
    the work that the coordinator assigns to them.

    The coordinator holds its lock during every call. After a call that may have added messages, it
    sends the result of `take_messages`.
    """

    num_to_begin: int
    """How many engines must have started before the first step begins."""

    def receivers(self, workers: Collection[R], version: int) -> list[R]:
        """Return the workers that are to receive weights of version `version` now."""
        ...

    def can_proceed(self, workers: Collection[Receiver], version: int) -> bool:
        """Return whether the trainer may proceed with the sync of weight version `version`."""
        ...

    def joined(self, engine: int) -> None:
        """Called when a worker of an engine has joined."""

    def lost(self, engine: int) -> None:
        """Called when the worker of an engine is lost."""

    def sent(self, engine: int, version: int) -> None:
        """Called when weights of version `version` are about to be sent to the worker of an engine."""

    def handle(self, engine: int, message: Mapping[str, Any], body: bytes) -> bool:
        """Handle a message of an engine's worker. Return False if the type of the message is
        unknown."""
        return False

    def take_messages(self) -> list[Message]:
        """Return the messages that are to be sent to workers, and remove them."""
        return []

    def queued_versions(self) -> list[int]:
        """Return, for each finished group that no step has trained on, the version of its oldest
        token."""
        return []

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the schedule itself."""
        return {}


class FixedSchedule(Schedule):
    """A schedule in which all engines generate parts of the same steps, so that they all receive
    the same versions."""

    def __init__(self, num_engines: int) -> None:
        self.num_to_begin = num_engines

    def receivers(self, workers: Collection[R], version: int) -> list[R]:
        """Return the workers that have not been sent the version yet. The list is empty until every
        engine has a worker and all of those workers have room for the version."""
        lacking = [worker for worker in workers if worker.sent < version]
        is_complete = len(workers) == self.num_to_begin
        return lacking if is_complete and all(worker.can_receive for worker in lacking) else []

    def can_proceed(self, workers: Collection[Receiver], version: int) -> bool:
        """Return whether the version can be sent now, or was sent to all engines already."""
        is_complete = len(workers) == self.num_to_begin
        has_it = is_complete and all(worker.sent >= version for worker in workers)
        return has_it or bool(self.receivers(workers, version))
