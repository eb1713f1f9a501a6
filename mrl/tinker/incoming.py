"""A request whose caller is known, and the limits within which its body is read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from mrl.service.callers import Refused
from mrl.service.http import read_object

MAX_PAGE = 1000


@dataclass(frozen=True)
class Incoming:
    owner: str
    """The user to whom the key of the request belongs."""
    content: bytes
    """The body, decompressed."""
    path: dict[str, str]
    query: dict[str, str]
    content_type: str
    accept: str
    depth: int
    """How deep objects and lists of a body may lie in each other."""

    def json(self) -> dict[str, Any]:
        """Return the object in the body; empty if there is no body. Raises Refused."""
        return read_object(self.content, self.depth) if self.content.strip() else {}

    def page(self, limit: int) -> tuple[int, int]:
        """Return `offset` and `limit` of the query; `limit` is the default. Raises Refused."""
        given = {"offset": 0, "limit": limit}
        for name, default in given.items():
            text = self.query.get(name, str(default))
            if not text.isascii() or not text.isdigit() or len(text) > 9:
                raise Refused(400, f"{name} is {text[:80]!r}, expected a number of 0 or more")
            given[name] = int(text)
        return given["offset"], min(given["limit"], MAX_PAGE)


async def read_content(request: Request, most: int, limit_s: float) -> bytes:
    """Return the body of a request, decompressed. Raises Refused if it has more than `most` bytes,
    compressed or not, or does not arrive within `limit_s` seconds."""
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared[:16]) > most:
        raise Refused(413, f"the body has {declared[:16]} bytes; at most {most} are read")
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise Refused(413, f"the body has more than {most} bytes")
                parts.append(part)
    except TimeoutError:
        raise Refused(408, "the request did not arrive in time; send it at once") from None
    content = b"".join(parts)
    match request.headers.get("content-encoding", "identity"):
        case "identity":
            return content
        case "zstd":
            return await asyncio.to_thread(_decompressed, content, most)
        case other:
            raise Refused(415, f"Content-Encoding is {other[:80]!r}; expected zstd, or none")


def _decompressed(content: bytes, most: int) -> bytes:
    """Return the content of one frame of zstd. No more than `most` bytes are ever decompressed."""
    try:
        import zstandard
    except ImportError:
        raise Refused(415, "this service has no zstandard; send bodies uncompressed") from None
    reader = zstandard.ZstdDecompressor(max_window_size=max(1 << 20, most)).stream_reader(content)
    try:
        found = reader.read(most + 1)
        while 0 < len(found) <= most and (more := reader.read(most + 1 - len(found))):
            found += more
    except (zstandard.ZstdError, MemoryError):
        raise Refused(400, "the body is no zstd, or ends too early") from None
    if len(found) > most:
        raise Refused(413, f"the body has more than {most} bytes when it is decompressed")
    return found
