"""Opens a bucket of weights in another process: a file that is mapped into its memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.system.registered_memory import register, unregister


def map_file(path: str, num_bytes: int) -> Tensor:
    """Return the first bytes of a file as u8[num_bytes], copy-on-write: writes stay in this process.

    SGLang's unpickler calls it in the engine (plugins/server/mrl_bucket_files.py).
    """
    return torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)


def map_registered_file(path: str, num_bytes: int) -> Tensor:
    """Return the first bytes of a file as u8[num_bytes], in memory that is registered with CUDA.

    The mapping is kept, because registering it takes as long as a copy, and goes when another file is
    at `path`, or none. It is shared with the process that writes the file: pages of a copy-on-write
    mapping would be copied to be pinned. Nothing may be written there. SGLang's unpickler calls it, as
    `map_file`.
    """
    file = os.stat(path)
    number = (file.st_dev, file.st_ino)
    for other in [other for other, known in _mappings.items() if _number(other) != known.number]:
        _mappings.pop(other).close()
    if path not in _mappings:
        whole = torch.from_file(path, shared=True, size=file.st_size, dtype=torch.uint8)
        _mappings[path] = _Mapping(number, whole, register(whole))
    return _mappings[path].whole[:num_bytes]


@dataclass(frozen=True)
class _Mapping:
    number: tuple[int, int]
    """That of the device and of the file."""
    whole: Tensor
    """u8[size of the file]."""
    is_registered: bool

    def close(self) -> None:
        if self.is_registered:
            unregister(self.whole)


_mappings: dict[str, _Mapping] = {}
"""Mappings by path. Each keeps its file alive, so that its number is no other file's."""


def _number(path: str) -> tuple[int, int] | None:
    try:
        file = os.stat(path)
    except OSError:
        return None
    return file.st_dev, file.st_ino
