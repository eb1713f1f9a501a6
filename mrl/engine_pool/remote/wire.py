"""The connection between the trainer and a worker, which exchange frames over TCP.

A frame consists of a message, which is a JSON object, and a body, which is bytes. The body holds
sample groups as encoded by `mrl.run.rollouts`. Nothing is pickled. A worker's first message
contains the run's random token. Before it has checked the token, the trainer accepts only a short
message without a body.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

MAX_MESSAGE = 1 << 20
"""Maximum size of a message in bytes."""
MAX_BODY = 1 << 38
"""Maximum size of a body in bytes."""
SEND_S = 60
"""Seconds after which a send fails if not a single byte could be sent."""
_FIRST = 4096
"""Maximum size in bytes of a message from a side whose token has not been checked yet."""
_SIZES = struct.Struct("!IQ")
_PART = 1 << 20
WAITS = "waits"
"""Type of the first message from a rollout rank without a worker. Such a rank only waits until the
run ends."""
RANK = "rank"
"""Type of the first message from a rollout rank that can start engines on its machine (see
`mrl.engine_pool.remote.engine_host`)."""
_SILENCE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 4}
"""Socket options with which the kernel notices within a minute that the other machine is gone. They
are needed because a machine that loses power does not close its connections."""


class WireClosed(Exception):
    """The connection has ended, or the other side has sent an invalid frame."""


class Wire:
    """One end of a connection. Any thread may call `send`, but only one thread may call `receive`."""

    def __init__(self, connection: socket.socket, *, is_trusted: bool = True) -> None:
        """If `is_trusted` is False, only short messages without a body are accepted until `trust`
        is called."""
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _SILENCE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        # If the other side hangs, a send must not block forever.
        limit = struct.pack("ll", int(SEND_S), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._socket = connection
        self._lock = threading.Lock()
        self._is_trusted = is_trusted
        self.heard = time.monotonic()
        """When data last arrived, on the clock of `time.monotonic`."""
        self.is_closed = False

    def trust(self) -> None:
        """Accept frames of any size from now on."""
        self._is_trusted = True

    def send(self, message: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a frame. Raises WireClosed, and ValueError for a message above MAX_MESSAGE bytes."""
        head = json.dumps(message).encode()
        if len(head) > MAX_MESSAGE:
            raise ValueError(f"got a message of {len(head)} bytes, expected at most {MAX_MESSAGE}")
        try:
            with self._lock:
                self._socket.sendall(_SIZES.pack(len(head), len(body)) + head)
                if body:
                    self._socket.sendall(body)
        except OSError as error:
            raise WireClosed(str(error)) from None

    @property
    def has_unread(self) -> bool:
        """Whether data has arrived that `receive` has not read yet."""
        with suppress(OSError, ValueError):  # the connection was closed
            poll = select.poll()  # not select(): a trainer may have more than 1,024 open files
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        return False

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Wait for a frame and return (message, body). Raises WireClosed."""
        num_head, num_body = _SIZES.unpack(self._read(_SIZES.size))
        most_head, most_body = (MAX_MESSAGE, MAX_BODY) if self._is_trusted else (_FIRST, 0)
        if num_head > most_head or num_body > most_body:
            self.close()
            raise WireClosed(f"a frame of {num_head} and {num_body} bytes")
        try:
            message = json.loads(self._read(num_head))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self.close()
            raise WireClosed("a message that is not a JSON object")
        return message, self._read(num_body)

    def _read(self, size: int) -> bytes:
        """Read `size` bytes. Memory is allocated only as bytes arrive, so a sender that announces a
        large frame cannot make this process allocate memory for bytes that never come."""
        found = bytearray()
        try:
            while len(found) < size:
                part = self._socket.recv(min(_PART, size - len(found)))
                if not part:
                    raise ConnectionError("the other side closed the connection")
                found += part
                self.heard = time.monotonic()
        except OSError as error:
            self.close()
            raise WireClosed(str(error)) from None
        return bytes(found)

    def close(self) -> None:
        """Close the connection; a `receive` in another thread raises. A second call does nothing."""
        self.is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def is_token(found: Any, token: str) -> bool:
    """Return whether `found` equals `token`. The duration of the comparison does not reveal the
    token."""
    return isinstance(found, str) and hmac.compare_digest(
        found.encode(errors="replace"), token.encode()
    )
