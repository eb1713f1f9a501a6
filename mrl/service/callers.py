"""Limits how many callers each socket of a service has at a time, and how much each caller may
send."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

TOO_MANY = "too many callers at a time; try again"


class Refused(Exception):
    """The service refuses a request, with an HTTP status and a reason in one line."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Limits on what one caller may send, and on the number of callers."""

    head_bytes: int = 16 << 10
    num_headers: int = 64
    body_bytes: int = 1 << 20
    operation_bytes: int = 8 << 20
    """Maximum size in bytes of a request body that posts an operation to a session. It is larger than
    `body_bytes`, because such a body may hold many tokens."""
    depth: int = 32
    """Maximum depth to which objects and lists may be nested in the body of a request."""
    head_s: float = 5.0
    """Seconds within which the head of the request, which contains the caller's secret token, must
    arrive."""
    request_s: float = 10.0
    """Seconds within which the whole request must arrive."""
    unread: int = 64
    """Maximum number of callers of one socket that are in the same `Stage`. If one more caller
    enters the stage, the oldest caller in that stage is refused."""
    connections: int = 32
    """Maximum number of requests of one socket that the service carries out at a time; further
    requests are refused."""


Stage = Literal["head", "body", "answer"]
"""What a caller is doing: sending the head of its request, sending the body, or receiving the
answer."""
SHUT: dict[Stage, int] = {
    "head": socket.SHUT_RD,
    "body": socket.SHUT_RD,
    "answer": socket.SHUT_RDWR,
}
"""For each stage, how the connection of a caller that is refused in this stage is shut down. The
shutdown wakes the thread that serves the caller. In the stages `head` and `body` only reading is
shut down, so that the reason for the refusal can still be sent."""


class Callers:
    """Counts the callers of one socket; each socket has its own counts.

    There is one count of callers for each `Stage`, and one count of the requests that the service
    is carrying out. Each count has its own limit. So callers without a valid token, which never get
    past the stage `head`, cannot use up the limit of the later stages. Callers that send or receive
    slowly do not use up the limit on the requests that are carried out.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._changing = threading.Lock()
        self._awaited: dict[Stage, dict[socket.socket, None]] = {stage: {} for stage in SHUT}
        self._num_answered = 0

    @contextmanager
    def awaiting(self, connection: socket.socket, stage: Stage) -> Iterator[None]:
        """Count a caller as being in a stage while the `with` block sends or receives.

        If the stage is full, the connection of the caller that has been in it longest is shut down.
        If this happens to `connection` while the block runs, the block's error is replaced by
        Refused. All other errors of the block are passed on.
        """
        awaited = self._awaited[stage]
        with self._changing:
            if len(awaited) >= self._limits.unread:
                oldest = next(iter(awaited))
                del awaited[oldest]
                with suppress(OSError):
                    oldest.shutdown(SHUT[stage])
            awaited[connection] = None
        try:
            yield
        except (Refused, OSError):
            if connection not in awaited:
                raise Refused(503, TOO_MANY) from None
            raise
        finally:
            with self._changing:
                awaited.pop(connection, None)

    def check_room(self) -> None:
        """Raise Refused if the service is already carrying out the maximum number of requests."""
        if self._num_answered >= self._limits.connections:
            raise Refused(503, TOO_MANY)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count one more request as being carried out during the `with` block. Raises Refused if
        the service is already carrying out the maximum number of requests."""
        with self._changing:
            self.check_room()
            self._num_answered += 1
        try:
            yield
        finally:
            with self._changing:
                self._num_answered -= 1
