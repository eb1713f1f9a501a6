"""Reads and writes the wire format of Protocol Buffers.

The API has a handful of messages whose large fields are raw bytes, so the format is read here and no
package is needed. A message is a sequence of fields, and each field is a tag (its number and its kind)
and a value. Numbers of fields: `mrl.tinker.messages`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Value = int | memoryview
"""The value of a field: an integer if the kind is VARINT, otherwise its bytes."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10
MAX_FIELDS = 1 << 20
"""Maximum number of fields of one message."""


class WireError(ValueError):
    """Bytes are not a message in this format."""


def fields(data: bytes | memoryview) -> Iterator[tuple[int, int, Value]]:
    """Yield number, kind and value of each field of a message, in the order in which they were
    written. Raises WireError."""
    view, at, count = memoryview(data), 0, 0
    while at < len(view):
        if (count := count + 1) > MAX_FIELDS:
            raise WireError(f"a message has more than {MAX_FIELDS} fields")
        tag, at = _varint(view, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise WireError("a field has the number 0")
        if kind == VARINT:
            value, at = _varint(view, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, at = _varint(view, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise WireError(f"field {number} is of the unknown kind {kind}")
        if size > len(view) - at:
            raise WireError(f"field {number} ends after the message")
        yield number, kind, view[at : at + size]
        at += size


def as_bytes(kind: int, value: Value) -> memoryview:
    """Return the value of a field that holds bytes, a text or a message. Raises WireError."""
    if kind != BYTES or isinstance(value, int):
        raise WireError("a field that should hold bytes holds a number")
    return value


def as_text(kind: int, value: Value) -> str:
    """Return the value of a field that holds a text. Raises WireError."""
    try:
        return bytes(as_bytes(kind, value)).decode()
    except UnicodeDecodeError:
        raise WireError("a text is not UTF-8") from None


def as_int(kind: int, value: Value) -> int:
    """Return the value of a field that holds a signed integer of 64 bits. Raises WireError."""
    if kind != VARINT or not isinstance(value, int):
        raise WireError("a field that should hold an integer holds bytes")
    return value - (1 << 64) if value >> 63 else value


def as_ints(kind: int, value: Value) -> list[int]:
    """Return the values of a repeated field of signed integers: one alone, or several that are
    packed. Raises WireError."""
    if kind == VARINT:
        return [as_int(kind, value)]
    view, at, found = as_bytes(kind, value), 0, list[int]()
    while at < len(view):
        one, at = _varint(view, at)
        found.append(as_int(VARINT, one))
    return found


def as_double(kind: int, value: Value) -> float:
    """Return the value of a field that holds a float of 64 bits. Raises WireError."""
    if kind != FIXED64 or isinstance(value, int):
        raise WireError("a field that should hold a double does not")
    return struct.unpack("<d", value)[0]


def int_field(number: int, value: int) -> bytes:
    """Return a field that holds an integer."""
    return _to_varint(number << 3 | VARINT) + _to_varint(value & (1 << 64) - 1)


def bytes_field(number: int, value: bytes | str) -> bytes:
    """Return a field that holds bytes, a text or a message."""
    content = value.encode() if isinstance(value, str) else value
    return _to_varint(number << 3 | BYTES) + _to_varint(len(content)) + content


def double_field(number: int, value: float) -> bytes:
    """Return a field that holds a float of 64 bits."""
    return _to_varint(number << 3 | FIXED64) + struct.pack("<d", value)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return the integer that begins at byte `at`, and the place after it."""
    value = 0
    for shift in range(MAX_VARINT_BYTES):
        if at + shift >= len(view):
            raise WireError("a number ends after the message")
        byte = view[at + shift]
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            if value >> 64:
                break
            return value, at + shift + 1
    raise WireError("a number has more than 64 bits")


def _to_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
