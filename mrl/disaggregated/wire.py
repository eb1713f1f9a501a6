"""This module holds the connection between the trainer and a worker: frames over TCP.

A frame is a JSON object, the message, and bytes, the body: rollouts as `mrl.run.rollouts` encodes them.
There is no pickle. The first message of a worker shows a random token of the run; until then frames
have no body and are short.
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
"""The most bytes of a message."""
MAX_BODY = 1 << 38
SEND_S = 60
"""Seconds without a byte that goes out after which a connection is given up."""
_FIRST = 4096
"""The most bytes of a message before the token was shown."""
_SIZES = struct.Struct("!IQ")
_PART = 1 << 20
WAITS = "waits"
"""The type of the first message of a rank that has no worker and waits for the end of the run."""
_SILENCE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 4}
"""A machine that lost its power closes nothing: the kernel finds out within a minute."""


class WireClosed(Exception):
    """The other side is gone, or has sent what is no frame; the message says which."""


class Wire:
    """A `Wire` is one end of a connection. `send` is for any thread, `receive` for one."""

    def __init__(self, connection: socket.socket, *, is_trusted: bool = True) -> None:
        """Until `trust` is called, an untrusted side may send short messages only."""
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _SILENCE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        # A side that hangs must not keep the other one in a send.
        limit = struct.pack("ll", int(SEND_S), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._socket = connection
        self._lock = threading.Lock()
        self._is_trusted = is_trusted
        self.heard = time.monotonic()
        """When something came last, by the clock that only runs forward."""
        self.is_closed = False

    def trust(self) -> None:
        """Accept frames of any size from now on."""
        self._is_trusted = True

    def send(self, message: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a frame. Raises WireClosed."""
        head = json.dumps(message).encode()
        if len(head) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(head)} bytes, expected at most {MAX_MESSAGE}")
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
        with suppress(OSError, ValueError):  # it was closed
            poll = select.poll()  # not select(): a trainer may hold more than 1,024 files
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
            raise WireClosed("a message that is no JSON object")
        return message, self._read(num_body)

    def _read(self, size: int) -> bytes:
        """Read `size` bytes; memory is taken as they come, whatever a frame says of its size."""
        found = bytearray()
        try:
            while len(found) < size:
                part = self._socket.recv(min(_PART, size - len(found)))
                if not part:
                    raise WireClosed("the other side closed the connection")
                found += part
                self.heard = time.monotonic()
        except OSError as error:
            self.close()
            raise WireClosed(str(error)) from None
        except WireClosed:
            self.close()
            raise
        return bytes(found)

    def close(self) -> None:
        """Close the connection; a `receive` in another thread ends. Harmless when repeated."""
        self.is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def is_token(found: Any, token: str) -> bool:
    """Return whether a message shows the token, in a time that tells nothing of it."""
    return isinstance(found, str) and hmac.compare_digest(
        found.encode(errors="replace"), token.encode()
    )
