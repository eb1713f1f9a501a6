"""Who may call a socket of a service at a time, and how much each may send."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

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
    """Callers of one socket whose head is not there yet; for another one the oldest is refused."""
    connections: int = 32
    """Requests of one socket that are answered at a time; more are refused."""


class Callers:
    """Counts the callers of one socket. Those that have not shown who they are take no place of those
    that have, and the callers of one socket none of another's."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._changing = threading.Lock()
        self._unread: dict[socket.socket, None] = {}
        self._num_answered = 0

    def enter(self, connection: socket.socket) -> None:
        """Note a caller whose head is awaited. Where there are too many, the oldest has to go."""
        with self._changing:
            if len(self._unread) >= self._limits.unread:
                oldest = next(iter(self._unread))
                del self._unread[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RD)  # wakes its thread, which refuses it
            self._unread[connection] = None

    def leave_unread(self, connection: socket.socket) -> bool:
        """Forget a caller whose head is not awaited any more; return whether it had to go."""
        with self._changing:
            if connection not in self._unread:
                return True
            del self._unread[connection]
            return False

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Hold one of the places of those that are answered. Raises Refused where none is free."""
        with self._changing:
            if self._num_answered >= self._limits.connections:
                raise Refused(503, TOO_MANY)
            self._num_answered += 1
        try:
            yield
        finally:
            with self._changing:
                self._num_answered -= 1
