"""Memory that one process writes and others of its node read.

It is a file without a name (memfd): the others open it under /proc, which the system allows to
processes of the same user, and it is freed with the last process that holds it, however that ends. So
nothing can be left behind. Whether one process can open another's is tried, not guessed from the host's
name: containers on one host may number their processes each in its own way.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

NONCE_BYTES = 16
MAX_BYTES_A_CALL = 1 << 30
"""Linux moves at most 2 GiB in one read or write."""


@dataclass(frozen=True)
class Handle:
    """How another process finds it."""

    pid: int
    fd: int
    nonce: bytes
    """Its first bytes, to know it from another file of that number."""

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"

    def can_be_read(self) -> bool:
        """From this process."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                return file.read(NONCE_BYTES) == self.nonce
        except OSError:
            return False

    def read(self, parts: list[tuple[int, Tensor]]) -> None:
        """Fill each contiguous u8[n] from its offset on.

        Raises RuntimeError where the process is gone, or wrote less than that.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                for offset, out in parts:
                    for start, piece in _pieces(offset, out):
                        _expect(os.preadv(file.fileno(), [piece], start), piece)
        except OSError as error:
            raise RuntimeError(f"memory shared by process {self.pid}: {error}") from error


class SharedBytes:
    """This process's memory, freed with the object."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("mrl-routes"), "r+b", buffering=0)
        self.handle = Handle(os.getpid(), self._file.fileno(), secrets.token_bytes(NONCE_BYTES))
        self._file.write(self.handle.nonce)

    @property
    def num_bytes(self) -> int:
        """What is written now."""
        return os.fstat(self._file.fileno()).st_size - NONCE_BYTES

    def write(self, offset: int, values: Tensor) -> None:
        """The contiguous u8[n] `values` at `offset`."""
        for start, piece in _pieces(offset, values):
            _expect(os.pwrite(self._file.fileno(), piece, start), piece)

    def clear(self) -> None:
        """Give the memory back; who reads on gets an error."""
        self._file.truncate(NONCE_BYTES)


def _pieces(offset: int, values: Tensor) -> Iterator[tuple[int, memoryview]]:
    """Places in the file and what belongs there."""
    view = memoryview(values.numpy().data)
    for start in range(0, len(view), MAX_BYTES_A_CALL):
        yield NONCE_BYTES + offset + start, view[start : start + MAX_BYTES_A_CALL]


def _expect(num_bytes: int, piece: memoryview) -> None:
    if num_bytes != len(piece):
        raise OSError(f"moved {num_bytes} bytes, expected {len(piece)}")
