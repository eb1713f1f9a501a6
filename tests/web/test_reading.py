"""Bodies that are compressed: one whole frame of zstd, or a reason."""

from __future__ import annotations

import os

import pytest
import zstandard

from mrl.web.limits import Refused
from mrl.web.reading import decompressed

CONTENT = b'{"text": "' + os.urandom(300_000).hex().encode() + b'"}' + b" " * 300_000
FRAME = zstandard.ZstdCompressor().compress(CONTENT)


def test_a_frame_is_read_whole() -> None:
    assert decompressed(FRAME, len(CONTENT)) == CONTENT
    assert decompressed(zstandard.ZstdCompressor().compress(b""), 0) == b""


@pytest.mark.parametrize(
    ("content", "most", "status", "match"),
    [
        (FRAME, len(CONTENT) - 1, 413, "when it is decompressed"),
        (zstandard.ZstdCompressor().compress(bytes(1 << 28)), 8 << 20, 413, "more than 8388608"),
        (FRAME[:-1], 1 << 21, 400, "ends too early"),
        (FRAME[: len(FRAME) // 2], 1 << 21, 400, "ends too early"),
        (FRAME[:3], 1 << 21, 400, "ends too early"),
        (b"", 1 << 21, 400, "ends too early"),
        (b"no zstd", 1 << 21, 400, "is no zstd"),
        (FRAME + b"x", 1 << 21, 400, "one frame"),
        (FRAME + b"x" * 256, 1 << 21, 400, "one frame"),
        (FRAME + FRAME, 1 << 21, 400, "one frame"),
    ],
    ids=[
        "long",
        "bomb",
        "last byte",
        "half",
        "magic",
        "empty",
        "other",
        "byte more",
        "piece more",
        "two",
    ],
)
def test_what_is_not_one_whole_frame_is_refused(content, most, status, match) -> None:
    with pytest.raises(Refused, match=match) as caught:
        decompressed(content, most)
    assert caught.value.status == status
