"""Samples a session on the engines of rollout ranks.

The weights of a session are its present ones or those of a sampler (`samplers.Source`). Whenever other
weights than before are to sample, they are sent with the next number, so that the numbers grow, as
the schedule of the workers demands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from mrl.collect.backlog import Started
from mrl.engine_pool.remote.coordinator import Coordinator
from mrl.engine_pool.remote.link import EngineLink
from mrl.engine_pool.remote.messages import Work
from mrl.engine_pool.remote.pool import NextAction
from mrl.errors import InputError
from mrl.service.sessions.engine_samples import Drawing, Generated
from mrl.service.sessions.samplers import Source
from mrl.types import SampleGroup
from parallel.policy import Policy


class RemoteSampling:
    """The engines of the rollout ranks. It implements `SessionEngines`; every method is a collective
    except `next_action`, which rank 0 alone calls."""

    def __init__(
        self,
        link: EngineLink,
        policy: Policy,
        in_place: Callable[[Source], AbstractContextManager[None]],
    ) -> None:
        """`link` must be open. `in_place` is `Samplers.in_place`."""
        self._link, self._policy, self._in_place = link, policy, in_place
        self._source, self._number = Source(None, 0, 0), -1
        """The weights of the turn, and the number with which they are sent."""
        self._sent: int | None = None
        """The label of the weights with the number `_number`; None if they were not sent."""
        self._groups: Sequence[SampleGroup] = ()
        self._how: Mapping[str, Drawing] = {}
        self._work_ids: list[int] = []
        """The work items of the turn; empty on ranks other than 0."""
        self._is_assigned = False
        self._found = Generated()
        self._num_ended = 0

    def begin(
        self, groups: Sequence[SampleGroup], how: Mapping[str, Drawing], source: Source
    ) -> None:
        self._groups, self._how, self._source = groups, how, source
        self._work_ids, self._is_assigned, self._found = [], False, Generated()
        if how and self._sent != source.label:
            self._number, self._sent = self._number + 1, None

    @property
    def has_samples(self) -> bool:
        """Whether `finish` has returned the results of the turn."""
        return not self._how

    def next_action(self, *, has_sent: bool) -> NextAction:
        """Return `send` or `take` if that can be done now, otherwise `wait`. `has_sent`: whether `send`
        was called in this turn. Raises the errors that the workers have reported."""
        coordinator = self._link.coordinator
        assert coordinator is not None
        seen = coordinator.poll(self._work_ids, self._number)
        if not has_sent:
            return "send" if seen.can_proceed else "wait"
        if seen.is_delivered:
            return "take"
        return "send" if seen.can_send else "wait"  # to a worker that took the place of a lost one

    def send(self) -> None:
        """Send the weights of the turn to the workers that lack them and, the first time, tell the
        engines what to generate. If a sampler cannot be read, the operations of the turn fail."""
        number = self._number
        self._policy.mount(adapter_only=True)
        if self._link.ask_coordinator(lambda coordinator: coordinator.poll([], number).can_send):
            with ExitStack() as undo:
                try:
                    undo.enter_context(self._in_place(self._source))
                except InputError as error:  # on all ranks
                    if self._is_assigned:
                        raise
                    failures = dict.fromkeys(self._how, " ".join(str(error).split()))
                    self._found, self._is_assigned = Generated(failures=failures), True
                    return
                self._link.sync(self._policy, number)
        self._sent = self._source.label
        if not self._is_assigned and self._link.coordinator is not None:
            self._assign(self._link.coordinator)
        self._is_assigned = True

    def _assign(self, coordinator: Coordinator[Any]) -> None:
        """Tell each engine which groups it generates."""

        def make(work_id: int, engine: int, part: int, num_parts: int) -> Work | None:
            share = self._groups[part::num_parts]
            if not share:
                return None
            names = dict.fromkeys(group.prompt.source for group in share)
            details = {
                "how": {name: self._how[name].as_json() for name in names},
                "num_ended": self._num_ended,
            }
            started = tuple(Started(group, self._how[group.prompt.source].seed) for group in share)
            return Work(work_id, engine, "samples", self._number, len(share), started, details)

        self._work_ids = coordinator.assign_parts(make)

    def take(self) -> None:
        """Take what the workers have delivered, which must be complete."""
        if (coordinator := self._link.coordinator) is not None:
            for work_id in self._work_ids:
                for part in coordinator.take(work_id).values():
                    self._found.add(Generated.of_notes(part.groups, part.notes))
        self._work_ids = []

    def finish(self) -> Generated:
        self._how = {}
        self._num_ended += self._found.num_ended
        return self._found

    def close(self) -> None:
        self._link.close()
