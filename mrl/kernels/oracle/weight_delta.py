"""Reference of `mrl.kernels.weight_delta`: one element after the other, as csrc/weight_delta.h says."""

from __future__ import annotations

import struct

CHUNK, LONG_GAP = 1 << 16, 255


def weight_delta(previous: bytes, current: bytes, element_size: int) -> bytes:
    """Return the delta that turns `previous` into `current`. An element has `element_size` bytes in
    both."""
    starts = range(0, len(current), element_size)
    pairs = [(previous[i : i + element_size], current[i : i + element_size]) for i in starts]
    changed, position_bytes, values, positions = [], [], b"", b""
    for first in range(0, len(pairs), CHUNK):
        chunk = pairs[first : first + CHUNK]
        at = [i for i, (before, after) in enumerate(chunk) if before != after]
        values += b"".join(chunk[i][1] for i in at)
        encoded = _bitmap(at, len(chunk)) if 8 * len(at) > len(chunk) else _gaps(at)
        positions += encoded
        changed.append(len(at))
        position_bytes.append(len(encoded))
    counts = [*changed, *position_bytes]
    return struct.pack(f"<{len(counts)}I", *counts) + values + positions


def _bitmap(at: list[int], size: int) -> bytes:
    bits = sum(1 << i for i in at)
    return bits.to_bytes((size + 7) // 8, "little")


def _gaps(at: list[int]) -> bytes:
    encoded, following = bytearray(), 0
    for i in at:
        num_long, rest = divmod(i - following, LONG_GAP)
        encoded += bytes([LONG_GAP] * num_long + [rest])
        following = i + 1
    return bytes(encoded)
