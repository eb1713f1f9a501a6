"""Who may call a socket of a service at a time, and how much each may send."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

TOO_MANY = "too many callers at a time; try again"


class Refused(Exception):
    """A request is refused with a status and one line that says why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What one caller may send, and how many there may be."""

    head_bytes: int = 16 << 10
    num_headers: int = 64
    body_bytes: int = 1 << 20
    operation_bytes: int = 8 << 20
    """The bytes that the body of a session's operation may have: it may hold many tokens."""
    depth: int = 32
    """Objects and lists in each other, in the body."""
    head_s: float = 5.0
    """Seconds for its head to arrive, which has the token."""
    request_s: float = 10.0
    """Seconds for the whole request to arrive."""
    unread: int = 64
    """Callers of one socket whose head is not there yet; for another one the oldest is refused. As many
    may send a body, and as many may take an answer."""
    connections: int = 32
    """Requests of one socket that are answered at a time; more are refused."""


Stage = Literal["head", "body", "answer"]
"""What a caller is waited for: it sends the head of its request, or the body, or takes the answer."""
SHUT: dict[Stage, int] = {
    "head": socket.SHUT_RD,
    "body": socket.SHUT_RD,
    "answer": socket.SHUT_RDWR,
}
"""What wakes the thread of a caller that has to go; it may still be told why before its answer."""


class Callers:
    """Counts the callers of one socket. Those that have not shown who they are take no place of those
    that have, and the callers of one socket none of another's. A caller that is waited for holds no
    place among those that are answered: however slowly it sends or takes, others get theirs."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._changing = threading.Lock()
        self._awaited: dict[Stage, dict[socket.socket, None]] = {stage: {} for stage in SHUT}
        self._num_answered = 0

    def enter(self, connection: socket.socket, stage: Stage = "head") -> None:
        """Note a caller that is waited for. Where there are too many, the oldest has to go."""
        with self._changing:
            awaited = self._awaited[stage]
            if len(awaited) >= self._limits.unread:
                oldest = next(iter(awaited))
                del awaited[oldest]
                with suppress(OSError):
                    oldest.shutdown(SHUT[stage])
            awaited[connection] = None

    def leave(self, connection: socket.socket, stage: Stage = "head") -> bool:
        """Forget a caller that is not waited for any more; return whether it had to go."""
        with self._changing:
            awaited = self._awaited[stage]
            if connection not in awaited:
                return True
            del awaited[connection]
            return False

    @contextmanager
    def awaiting(self, connection: socket.socket, stage: Stage) -> Iterator[None]:
        """Wait for a caller in the block. Raises what that raises, and Refused where it had to go."""
        self.enter(connection, stage)
        try:
            yield
        except (Refused, OSError):
            if self.leave(connection, stage):
                raise Refused(503, TOO_MANY) from None
            raise
        self.leave(connection, stage)

    def check_room(self) -> None:
        """Raise Refused where no more can be answered now."""
        if self._num_answered >= self._limits.connections:
            raise Refused(503, TOO_MANY)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Hold one of the places of those that are answered. Raises Refused where none is free."""
        with self._changing:
            self.check_room()
            self._num_answered += 1
        try:
            yield
        finally:
            with self._changing:
                self._num_answered -= 1
