"""Limits on the callers of a service's socket: how many at a time, and how much each may send."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

TOO_MANY = "too many callers at a time; try again"


class Refused(Exception):
    """A refused request, with a status and one line that says why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What one caller may send, and how many callers there may be."""

    head_bytes: int = 16 << 10
    num_headers: int = 64
    body_bytes: int = 1 << 20
    operation_bytes: int = 8 << 20
    """The largest body of a session's operation, which may hold many tokens."""
    depth: int = 32
    """The deepest nesting of objects and lists in the body."""
    head_s: float = 5.0
    """Seconds for the head, which has the token, to arrive."""
    request_s: float = 10.0
    """Seconds for the whole request to arrive."""
    unread: int = 64
    """Callers of one socket whose head has not arrived yet; one more causes the oldest to be refused.
    The same limit holds for callers that send a body, and for callers that receive an answer."""
    connections: int = 32
    """Requests of one socket that are answered at a time; more are refused."""


Stage = Literal["head", "body", "answer"]
"""What a caller does: it sends the head of its request, sends the body, or receives the answer."""
SHUT: dict[Stage, int] = {
    "head": socket.SHUT_RD,
    "body": socket.SHUT_RD,
    "answer": socket.SHUT_RDWR,
}
"""How to shut down the connection of a refused caller, which wakes its thread; before the answer, the
reason can still be sent."""


class Callers:
    """Counts the callers of one socket. Callers that have not authenticated do not use up places of
    those that have, and sockets have separate counts. A caller that is still sending or receiving does
    not use up a place among those that are answered, so slow callers do not delay others."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._changing = threading.Lock()
        self._awaited: dict[Stage, dict[socket.socket, None]] = {stage: {} for stage in SHUT}
        self._num_answered = 0

    def enter(self, connection: socket.socket, stage: Stage = "head") -> None:
        """Add a caller that is sending or receiving. If there are too many, the oldest is dropped."""
        with self._changing:
            awaited = self._awaited[stage]
            if len(awaited) >= self._limits.unread:
                oldest = next(iter(awaited))
                del awaited[oldest]
                with suppress(OSError):
                    oldest.shutdown(SHUT[stage])
            awaited[connection] = None

    def leave(self, connection: socket.socket, stage: Stage = "head") -> bool:
        """Remove a caller that has finished sending or receiving; return whether it was dropped."""
        with self._changing:
            awaited = self._awaited[stage]
            if connection not in awaited:
                return True
            del awaited[connection]
            return False

    @contextmanager
    def awaiting(self, connection: socket.socket, stage: Stage) -> Iterator[None]:
        """Send or receive in the block. Raises what the block raises, and Refused if the caller was
        dropped."""
        self.enter(connection, stage)
        try:
            yield
        except (Refused, OSError):
            if self.leave(connection, stage):
                raise Refused(503, TOO_MANY) from None
            raise
        self.leave(connection, stage)

    def check_room(self) -> None:
        """Raise Refused if no more requests can be answered now."""
        if self._num_answered >= self._limits.connections:
            raise Refused(503, TOO_MANY)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Hold one of the places for requests that are answered. Raises Refused if none is free."""
        with self._changing:
            self.check_room()
            self._num_answered += 1
        try:
            yield
        finally:
            with self._changing:
                self._num_answered -= 1
