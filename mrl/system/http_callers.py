"""Checks whether an HTTP request to mrl comes from a web page, and whether it has the right token."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

MAX_UNWANTED_BYTES = 1 << 20
LINGER_S = 1.0
"""After a request is refused, at most MAX_UNWANTED_BYTES more bytes are read, for at most LINGER_S
seconds."""


def is_of_this_machine(host: str | None, origin: str | None) -> bool:
    """Return whether the headers Host and Origin show that no web page made the request.

    If a web page makes a request to another host, the browser sends the page's origin. In a DNS
    rebinding attack, the page's own host name resolves to this machine, but then the header Host
    holds that name instead of a loopback name or address.
    """
    with suppress(ValueError):
        name = urlsplit(f"//{'localhost' if host is None else host}").hostname or ""
        return origin is None and (name == "localhost" or ipaddress.ip_address(name).is_loopback)
    return False


def has_token(authorization: str | None, token: str) -> bool:
    """Return whether the Authorization header has the token, compared in constant time."""
    given = (authorization or "").encode(errors="replace")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def drain(connection: socket.socket) -> None:
    """Read the rest of a refused request for a short time.

    If a connection is closed while bytes are unread, the system resets the connection, and the client
    may see the reset before it has read the answer.
    """
    end, left = time.monotonic() + LINGER_S, MAX_UNWANTED_BYTES
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while left > 0 and (seconds := end - time.monotonic()) > 0:
            connection.settimeout(seconds)
            if not (part := connection.recv(min(left, 1 << 16))):
                return
            left -= len(part)
