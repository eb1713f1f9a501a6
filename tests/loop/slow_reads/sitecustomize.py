"""Makes a disk slow, or lets it hang, where this folder is first on PYTHONPATH: digests of files are
taken of a piece at a time, with a pause after each, as long as the piece takes at a slow disk's rate.
Nothing of mrl is replaced."""

import hashlib
import os
import time
from typing import Any

PIECE = 1 << 16
PAUSE_S = float(os.environ.get("MRL_TEST_PAUSE_S", "0"))
"""After a whole piece; the checkpoint has many files that are smaller."""
HANGS_AFTER = int(os.environ.get("MRL_TEST_HANGS_AFTER", "-1"))
"""The pieces after which rank 1 reads no more."""


def file_digest(stream: Any, name: str) -> Any:
    digest, number = hashlib.new(name), 0
    while piece := stream.read(PIECE):
        digest.update(piece)
        time.sleep(PAUSE_S * len(piece) / PIECE)
        number += 1
        if number == HANGS_AFTER and os.environ.get("RANK") == "1":
            time.sleep(3600)
    return digest


hashlib.file_digest = file_digest  # pyright: ignore[reportAttributeAccessIssue]
