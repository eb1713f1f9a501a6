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

    engine: int
    """The number of the worker's engine."""
    sent: int
    """The newest version of the weights that was sent to the worker; -1 for none."""
    can_receive: bool
    """Whether the worker has room for another version of the weights."""
    needs: int
    """If the engine is leaving, the newest version of the weights that its work needs; otherwise
    -1."""


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
    joins_at_once: bool = False
    """Whether an engine that was added serves as soon as it has weights, and not only from the next
    step on."""

    def receivers(self, workers: Collection[R], version: int) -> list[R]:
        """Return the workers that are to receive weights of version `version` now."""
        ...

    def can_proceed(self, workers: Collection[Receiver], version: int) -> bool:
        """Return whether the trainer may proceed with the sync of weight version `version`."""
        ...

    def serve(self, engine: int) -> None:
        """Called when an engine begins to take part in what is given out."""

    def retire(self, engine: int) -> None:
        """Called when an engine that may serve gets no further work. It may still have some."""

    def num_leased(self, engine: int) -> int:
        """Return the number of groups that an engine generates under leases."""
        return 0

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
    """A schedule in which all engines that serve generate parts of the same steps, so that they all
    receive the same versions.

    An engine that was added receives one version, which proves that it works, and nobody waits for
    it. An engine that is leaving is waited for as if it served, but receives only the versions that its
    work needs. So nobody has newer weights than an engine that serves would have allowed, and what the
    leaving engine does not finish can be done by the weights that it names.
    """

    def __init__(self, num_engines: int) -> None:
        self.num_to_begin = num_engines
        self._serving: set[int] = set()

    def serve(self, engine: int) -> None:
        self._serving.add(engine)

    def retire(self, engine: int) -> None:
        self._serving.discard(engine)

    def receivers(self, workers: Collection[R], version: int) -> list[R]:
        """Return the workers to which the version is to be sent now.

        Of the engines that serve or are leaving, these are all workers that lack the version and need
        it, or none as long as an engine that serves has no worker or a worker has no room. A worker of
        an added engine is among them if it has no weights yet.
        """
        known = self._waited_for(workers)
        added = [
            each for each in workers if each not in known and each.sent < 0 and each.can_receive
        ]
        if not self.can_proceed(workers, version):
            return added
        lacking = [each for each in known if each.sent < version]
        needing = [e for e in lacking if e.engine in self._serving or e.needs >= version]
        return [*needing, *added]

    def can_proceed(self, workers: Collection[Receiver], version: int) -> bool:
        """Return whether the version can be sent now, or was sent already, to all engines that serve
        or are leaving."""
        is_complete = self._serving <= {worker.engine for worker in workers}
        return is_complete and all(
            worker.sent >= version or worker.can_receive for worker in self._waited_for(workers)
        )

    def _waited_for(self, workers: Collection[R]) -> list[R]:
        """Return the workers of the engines that serve or are leaving."""
        return [each for each in workers if each.engine in self._serving or each.needs >= 0]
