"""The callers of one socket, by the stage of their request, and the limits on their number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from mrl.web.limits import Limits

Stage = Literal["head", "body", "answer", "idle"]
AsError = Callable[[int, str], Mapping[str, Any]]
"""Returns the JSON object that answers a refused request, given the HTTP status and the reason."""
GRACE_S = 0.1
"""Seconds from the moment at which a stage is too full to the refusal of its oldest callers. Requests
that have already arrived reach the next stage in that time."""


class Caller(Protocol):
    """A caller that can be in a stage."""

    def turn_away(self) -> None:
        """End the present stage, because too many callers are in it."""
        ...


class Callers:
    """The callers of one socket, by stage. Its methods are called in the thread of the server."""

    def __init__(
        self, limits: Limits, as_error: AsError, *, answers_half_closed: bool = True
    ) -> None:
        """`answers_half_closed`: whether a caller that has closed its sending side still gets its
        answer. If false, the application sees at once that such a caller has gone."""
        self.limits, self.as_error = limits, as_error
        self.answers_half_closed = answers_half_closed
        self._stages: dict[Stage, dict[Caller, None]] = {
            "head": {},
            "body": {},
            "answer": {},
            "idle": {},
        }

    def enter(self, caller: Caller, stage: Stage) -> None:
        """Record that a caller, so far in no stage, is in this one. If there are too many, the oldest
        ones are turned away soon."""
        there = self._stages[stage]
        there[caller] = None
        if len(there) == self._most(stage) + 1:
            asyncio.get_running_loop().call_later(GRACE_S, self._thin, stage)

    def leave(self, caller: Caller, stage: Stage) -> None:
        self._stages[stage].pop(caller, None)

    def _most(self, stage: Stage) -> int:
        return self.limits.idle if stage == "idle" else self.limits.unread

    def _thin(self, stage: Stage) -> None:
        there = self._stages[stage]
        for caller in list(there)[: max(0, len(there) - self._most(stage))]:
            caller.turn_away()
