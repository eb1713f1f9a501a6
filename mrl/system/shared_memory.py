"""Memory that one process writes and other processes on the same node read.

The memory is in memfds. A memfd is a file without a name: it disappears with the last process that
has it open or mapped, even if that process is killed, so the memory cannot leak. Other processes
open it under /proc, which the system allows only to the same user.

`SharedMemory` provides buffers that readers map, and that every weight sync reuses. `SharedBytes`
is a file that grows until it is cleared, and from which readers copy. A reader tests whether it can
read the memory (`Handle.can_be_read`). It cannot infer this from the host name, because containers
on one host may number their processes independently.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.system.registered_memory import register, unregister

NONCE_BYTES = 16
MAX_BYTES_A_CALL = 1 << 30
"""Largest number of bytes that one system call is asked to move. Linux moves at most 2 GiB per call."""


class SharedBuffer:
    """A memfd that is mapped as a tensor u8[num_bytes], or u8[1] if `num_bytes` is 0.

    The first access to each page takes ten times as long as copying the page.
    """

    def __init__(self, num_bytes: int, device: torch.device | None = None) -> None:
        """Create the buffer.

        If a GPU copies to or from the memory, pass this GPU as `device`. The memory is then registered
        with CUDA, which makes the copies faster.
        """
        size = max(num_bytes, 1)  # a file of length 0 cannot be mapped
        fd = os.memfd_create("mrl-weights")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, size)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self.tensor = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        if device is not None and register(self.tensor, device):
            # The finalizer keeps the tensor, and thus the mapping, until it unregisters the memory.
            weakref.finalize(self, unregister, self.tensor).atexit = False


class SharedMemory:
    """Numbered buffers that are reused, and replaced when a larger one is needed."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Prepare without creating a buffer. `device` is passed to each `SharedBuffer`."""
        self._device = device
        self._buffers: dict[int, SharedBuffer] = {}

    def take(self, num_bytes: int, number: int = 0) -> SharedBuffer:
        """Return the buffer `number`, with at least `num_bytes` bytes.

        An earlier call with this `number` may have returned the same memory.
        """
        buffer = self._buffers.get(number)
        if buffer is None or buffer.tensor.numel() < num_bytes:
            buffer = None
            self._buffers.pop(number, None)  # free it first, because both might not fit
            buffer = self._buffers[number] = SharedBuffer(num_bytes, self._device)
        return buffer


@dataclass(frozen=True)
class Handle:
    """The record with which another process finds and reads the memory of a `SharedBytes`."""

    pid: int
    fd: int
    nonce: bytes
    """The first bytes of the memory, which distinguish it from another file with the same path."""

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"

    def can_be_read(self) -> bool:
        """Return whether this process can read the memory."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                return file.read(NONCE_BYTES) == self.nonce
        except OSError:
            return False

    def read(self, parts: list[tuple[int, Tensor]]) -> None:
        """For each (offset, tensor), fill the contiguous tensor u8[n] with the n bytes from `offset`.

        Raises RuntimeError if the process that wrote the memory has ended, or if the memory ends
        before the last of these bytes.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                for offset, out in parts:
                    for start, piece in _pieces(offset, out):
                        _expect(os.preadv(file.fileno(), [piece], start), piece)
        except OSError as error:
            raise RuntimeError(f"memory shared by process {self.pid}: {error}") from error


class SharedBytes:
    """Bytes of this process that other processes can read. They are freed with this object."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("mrl-routes"), "r+b", buffering=0)
        self.handle = Handle(os.getpid(), self._file.fileno(), secrets.token_bytes(NONCE_BYTES))
        self._file.write(self.handle.nonce)

    @property
    def num_bytes(self) -> int:
        """Number of bytes written so far."""
        return os.fstat(self._file.fileno()).st_size - NONCE_BYTES

    def write(self, offset: int, values: Tensor) -> None:
        """Write the contiguous u8[n] `values` at `offset`."""
        for start, piece in _pieces(offset, values):
            _expect(os.pwrite(self._file.fileno(), piece, start), piece)

    def clear(self) -> None:
        """Free the memory. Reading bytes that were in it then raises RuntimeError."""
        self._file.truncate(NONCE_BYTES)


def _pieces(offset: int, values: Tensor) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset in the file, slice of `values`) for slices that one system call can move."""
    view = memoryview(values.numpy().data)
    for start in range(0, len(view), MAX_BYTES_A_CALL):
        yield NONCE_BYTES + offset + start, view[start : start + MAX_BYTES_A_CALL]


def _expect(num_bytes: int, piece: memoryview) -> None:
    if num_bytes != len(piece):
        raise OSError(f"moved {num_bytes} bytes, expected {len(piece)}")
