"""Maps files that another process has filled with weights, so that the weights need not be copied."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.system.registered_memory import register, unregister


def map_file(path: str, num_bytes: int) -> Tensor:
    """Return the first `num_bytes` bytes of a file as a mapped tensor u8[num_bytes].

    The mapping is copy-on-write, so writes to the tensor do not change the file. SGLang's unpickler
    calls this function in the engine (plugins/server/mrl_bucket_files.py).
    """
    return torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)


def map_registered_file(path: str, num_bytes: int) -> Tensor:
    """Return the first `num_bytes` bytes of a file as u8[num_bytes], in memory registered with CUDA.

    Do not write to the tensor, because the mapping is shared with the process that writes the file.
    A copy-on-write mapping is not used, because pinning would copy its pages. Registering takes as
    long as a copy, so the mapping is kept until the file at `path` is removed or replaced. Like
    `map_file`, this function is called by SGLang's unpickler in the engine.
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
    """Device and inode number of the file."""
    whole: Tensor
    """The mapped bytes of the whole file, u8[size of the file]."""
    is_registered: bool

    def close(self) -> None:
        if self.is_registered:
            unregister(self.whole)


_mappings: dict[str, _Mapping] = {}
"""Mappings by path of the file. No other file can get a mapped file's inode number, even after the
mapped file was removed, because the system keeps a file while it is mapped."""


def _number(path: str) -> tuple[int, int] | None:
    try:
        file = os.stat(path)
    except OSError:
        return None
    return file.st_dev, file.st_ino
