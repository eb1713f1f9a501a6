"""Opens a bucket of weights in another process: a file that is mapped into its memory."""

from __future__ import annotations

import torch
from torch import Tensor


def map_file(path: str, num_bytes: int) -> Tensor:
    """Return the first bytes of a file as u8[num_bytes], copy-on-write: writes stay in this process.

    SGLang's unpickler calls it in the engine (plugins/server/mrl_bucket_files.py).
    """
    return torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)
