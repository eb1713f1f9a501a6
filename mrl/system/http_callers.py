"""Tells who may call a server of ours over HTTP: not web pages, and only those who have the token."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

MAX_UNWANTED_BYTES = 1 << 20
LINGER_S = 1.0
"""How much of a refused request is still read, and for how long."""


def is_of_this_machine(host: str | None, origin: str | None) -> bool:
    """Whether no web page asks, by the headers of the request: a browser names the page's origin, or
    the page's own name as the host, where that name was made to point here (DNS rebinding)."""
    with suppress(ValueError):
        name = urlsplit(f"//{'localhost' if host is None else host}").hostname or ""
        return origin is None and (name == "localhost" or ipaddress.ip_address(name).is_loopback)
    return False


def has_token(authorization: str | None, token: str) -> bool:
    """Whether the header Authorization has the token. The time that it takes does not tell how much of
    it was right."""
    given = (authorization or "").encode(errors="replace")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def drain(connection: socket.socket) -> None:
    """Read on for a while after a refusal: to close a connection with bytes unread resets it, and that
    may overtake the answer."""
    end, left = time.monotonic() + LINGER_S, MAX_UNWANTED_BYTES
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while left > 0 and (seconds := end - time.monotonic()) > 0:
            connection.settimeout(seconds)
            if not (part := connection.recv(min(left, 1 << 16))):
                return
            left -= len(part)
