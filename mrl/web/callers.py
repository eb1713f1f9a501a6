"""Checks of the head of a request: whether it comes from a web page, and whether it has the token."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from mrl.web.limits import Limits, Refused

SINGLE = frozenset(
    (
        *(b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect"),
        *(b"host", b"origin", b"transfer-encoding", b"x-api-key", b"x-timeout-s"),
    )
)
"""Headers that a request may have once. Two values could be read in two ways."""

CONTROL = re.compile(rb"[\0-\x08\x0a-\x1f\x7f]")


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


def check_head(
    version: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], limits: Limits
) -> None:
    """Raise Refused if the head of a request is too large, or can be read in two ways."""
    if version not in ("1.0", "1.1"):
        raise Refused(400, f"the request is of HTTP/{version[:8]}; expected HTTP/1.1")
    if len(headers) > limits.num_headers:
        raise Refused(431, f"the request has more than {limits.num_headers} headers")
    size = len(target) + sum(len(name) + len(value) + 4 for name, value in headers)
    if size > limits.head_bytes:
        raise Refused(431, f"the head of the request has more than {limits.head_bytes} bytes")
    seen = set()
    for name, value in headers:
        if name in seen and name in SINGLE:
            raise Refused(400, f"the header {name.decode()} occurs twice")
        seen.add(name)
        if CONTROL.search(value):
            raise Refused(400, f"the header {name.decode()} has a control character")
