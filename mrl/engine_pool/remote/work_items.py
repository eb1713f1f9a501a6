"""Keeps a coordinator's work items until they are delivered, and what was delivered until it is
taken. It does no I/O and has no lock."""

from __future__ import annotations

import dataclasses

from mrl.engine_pool.remote.messages import Delivered, Work


class WorkItems:
    """The work items of a coordinator."""

    def __init__(self) -> None:
        self.open: dict[int, Work] = {}
        """Work items that are not delivered yet, by id, in the order in which they were
        assigned."""
        self._results: dict[int, dict[int, Delivered]] = {}
        """The delivered groups of each work item that `take` has not removed yet, by work id and
        then by part (0 for a batch, the index of the evaluation set for an evaluation)."""
        self._last_id = 0

    def new_id(self) -> int:
        """Return an unused work id."""
        self._last_id += 1
        return self._last_id

    def add(self, work: Work) -> None:
        self.open[work.work_id] = work
        self._results[work.work_id] = {}

    def put(self, delivered: Delivered) -> int:
        """Add groups from a checkpoint as a work item that is already delivered; return its id."""
        work_id = self.new_id()
        self._results[work_id] = {0: delivered}
        return work_id

    def deliver(self, work_id: int, part: int, delivered: Delivered) -> None:
        """Keep a part of a work item; nothing happens if the work item was taken already."""
        if (result := self._results.get(work_id)) is not None:
            result[part] = delivered

    def finish(self, work_id: int) -> bool:
        """Record that all parts of a work item are delivered. Return False if that was known."""
        return self.open.pop(work_id, None) is not None

    @property
    def done(self) -> set[int]:
        """The ids of the work items that are delivered and not taken yet."""
        return self._results.keys() - self.open.keys()

    def delivered(self) -> list[Delivered]:
        """Return all parts of the work items that are delivered and not taken yet."""
        return [part for work_id in self.done for part in self._results[work_id].values()]

    def take(self, work_id: int) -> dict[int, Delivered]:
        return self._results.pop(work_id)

    def peek(self, work_id: int) -> dict[int, Delivered]:
        return self._results[work_id]

    def of_engine(self, engine: int) -> list[Work]:
        """Return the work items of an engine that are not delivered yet, the oldest first."""
        return [work for work in self.open.values() if work.engine == engine]

    def change(self, work: Work, *, engine: int, version: int) -> Work:
        """Give a work item to an engine, to be generated with the weights `version`. Return it."""
        changed = dataclasses.replace(work, engine=engine, version=version)
        self.open[work.work_id] = changed
        return changed
