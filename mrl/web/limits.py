"""The limits of a server, and the refusal of a request. Imports no HTTP library."""

from __future__ import annotations

from dataclasses import dataclass

TOO_MANY = "too many callers at a time; try again"


class Refused(Exception):
    """A request is refused, with an HTTP status and a reason in one line."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class NotYet(Refused):
    """A request needs something that does not exist yet. The server calls the request's function again,
    without holding a thread meanwhile. After `limit_s` seconds the request is refused with 503."""

    def __init__(self, why: str, limit_s: float) -> None:
        super().__init__(503, why)
        self.limit_s = limit_s


@dataclass(frozen=True)
class Limits:
    """Limits on what one caller may send, and on the number of callers of one socket."""

    head_bytes: int = 16 << 10
    num_headers: int = 64
    body_bytes: int = 1 << 20
    operation_bytes: int = 8 << 20
    """Maximum size in bytes of a request body that posts work to a session. It is larger than
    `body_bytes`, because such a body may hold many tokens."""
    depth: int = 32
    """Maximum depth to which objects and lists may be nested in the body of a request."""
    head_s: float = 5.0
    """Seconds within which the head of the request, which contains the caller's secret, must
    arrive."""
    request_s: float = 10.0
    """Seconds within which the whole request must arrive."""
    answer_s: float = 5.0
    """Seconds within which a caller must receive its answer or, if the answer is a stream, each part of
    it that the system cannot buffer."""
    idle_s: float = 30.0
    """Seconds after which a connection is closed if no further request comes."""
    stop_s: int = 5
    """Seconds for which a server that is stopped waits for requests that are being carried out."""
    unread: int = 64
    """Maximum number of callers that are in the same stage: sending the head of a request, sending
    its body, or receiving the answer. If there are more, the oldest of them are refused."""
    idle: int = 1024
    """Maximum number of connections that are kept for further requests; the oldest are closed."""
    connections: int = 32
    """Maximum number of requests that are carried out at a time; further ones are refused."""
    threads: int = 32
    """Maximum number of threads in which requests are carried out."""
