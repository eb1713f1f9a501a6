"""Reads the body of a request: its size, its compression and its JSON have limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request

from mrl.errors import InputError
from mrl.system.json_text import each_key_once
from mrl.web.limits import Refused

LARGEST = {bool: 2, int: 1 << 63, float: float("inf")}
"""Exclusive upper bound on the absolute value of a number, by type. Integers such as seeds and
sizes have 64 bits."""

PIECE_BYTES = 256
"""Bytes that are decompressed at a time. They become at most about 11 MB, because a block of zstd has
at least 3 bytes and becomes at most 128 KiB."""


async def read_content(request: Request, most: int, *, encodings: tuple[str, ...] = ()) -> bytes:
    """Return the body of a request, decompressed if its encoding is one of `encodings`, of which
    "zstd" is known. Raises Refused if it has more than `most` bytes, compressed or not."""
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit()) or int(declared[:16]) > most:
        raise Refused(413, f"the body has {declared[:16]} bytes; at most {most} are read")
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > most:
            raise Refused(413, f"the body has more than {most} bytes")
    coding = request.headers.get("content-encoding", "identity")
    if coding == "identity":
        return bytes(content)
    if coding not in encodings:
        expected = " or ".join((*encodings, "none"))
        raise Refused(415, f"Content-Encoding is {coding[:80]!r}; expected {expected}")
    return await asyncio.to_thread(decompressed, bytes(content), most)


def decompressed(content: bytes, most: int) -> bytes:
    """Return the content of one frame of zstd. Decompression ends soon after `most` bytes. Raises
    Refused if there are more, or if `content` is not exactly one whole frame."""
    try:
        import zstandard
    except ImportError:
        raise Refused(415, "this service has no zstandard; send bodies uncompressed") from None
    num_read = 0
    frame = zstandard.ZstdDecompressor(max_window_size=max(1 << 20, most)).decompressobj()
    found = bytearray()
    try:
        for start in range(0, len(content), PIECE_BYTES):
            found += frame.decompress(content[start : start + PIECE_BYTES])
            num_read = start + PIECE_BYTES
            if len(found) > most:
                raise Refused(413, f"the body has more than {most} bytes when it is decompressed")
            if frame.eof:
                break
    except (zstandard.ZstdError, MemoryError):
        raise Refused(400, "the body is no zstd, or is damaged") from None
    if not frame.eof:
        raise Refused(400, "the body is no whole frame of zstd: it ends too early")
    if frame.unused_data or num_read < len(content):
        raise Refused(400, "the body has more bytes after a frame of zstd; send one frame")
    return bytes(found)


def read_object(body: bytes | bytearray, depth: int) -> dict[str, Any]:
    """Return the JSON object that `body` holds. Raises Refused."""
    try:
        value = json.loads(
            body.decode(), object_pairs_hook=each_key_once, parse_constant=_no_constant
        )
        _check(value, depth)
    except RecursionError:
        raise Refused(400, f"the body has more than {depth} levels") from None
    except (InputError, ValueError) as error:
        raise Refused(400, f"the body is not JSON that is read here: {error}") from None
    if not isinstance(value, dict):
        raise Refused(400, f"the body is a {type(value).__name__}; expected a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check(value: Any, depth: int) -> None:
    """Raise ValueError if a value is nested too deeply, or contains a number that is too large, the
    character NUL, or text that cannot be encoded in UTF-8."""
    if depth < 0:
        raise ValueError("objects and lists are nested too deeply")
    if isinstance(value, str):
        value.encode()  # a lone surrogate raises UnicodeEncodeError
        if "\0" in value:
            raise ValueError("a text has the character NUL")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check(key, depth)
            _check(inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, depth - 1)
    elif isinstance(value, (int, float)) and not abs(value) < LARGEST[type(value)]:
        raise ValueError("a number is too large")
