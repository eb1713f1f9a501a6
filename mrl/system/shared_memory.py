"""Memory that one process writes and others of its node read: memfds, which nobody can leave behind.

A memfd is a file without a name: it is gone with the last process that has it open or mapped, whoever
is killed. The others open it under /proc, which the system allows to processes of the same user only.

`SharedMemory` gives buffers that the readers map: tensors of one size, used again in every sync.
`SharedBytes` is a file that grows and is emptied, which the readers copy from; whether a process can
read another's is tried, not guessed from the host's name, as containers on one host may number their
processes each in its own way.
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
"""Linux moves at most 2 GiB in one read or write."""


class SharedBuffer:
    """A `SharedBuffer` is u8[num_bytes] in a memfd.

    On the first touch each page costs as much as copying it ten times.
    """

    def __init__(self, num_bytes: int, device: torch.device | None = None) -> None:
        """`device`: a GPU to and from which the memory is copied; it is registered with CUDA then."""
        size = max(num_bytes, 1)  # nothing of length 0 can be mapped
        fd = os.memfd_create("mrl-weights")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, size)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self.tensor = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        if device is not None and register(self.tensor, device):
            # It keeps the tensor, and with it the mapping, until then.
            weakref.finalize(self, unregister, self.tensor).atexit = False


class SharedMemory:
    """Keeps buffers that are used again and again, and that grow."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: as `SharedBuffer` has it."""
        self._device = device
        self._buffers: dict[int, SharedBuffer] = {}

    def take(self, num_bytes: int, number: int = 0) -> SharedBuffer:
        """Return at least `num_bytes`; an earlier call with this `number` may have returned the same
        memory."""
        buffer = self._buffers.get(number)
        if buffer is None or buffer.tensor.numel() < num_bytes:
            buffer = None
            self._buffers.pop(number, None)  # first: both at once might not fit
            buffer = self._buffers[number] = SharedBuffer(num_bytes, self._device)
        return buffer


@dataclass(frozen=True)
class Handle:
    """A `Handle` is how another process finds a `SharedBytes`."""

    pid: int
    fd: int
    nonce: bytes
    """Its first bytes, to know it from another file of that number."""

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
    """Holds bytes of this process for others to read; they are freed with the object."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("mrl-routes"), "r+b", buffering=0)
        self.handle = Handle(os.getpid(), self._file.fileno(), secrets.token_bytes(NONCE_BYTES))
        self._file.write(self.handle.nonce)

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are written now."""
        return os.fstat(self._file.fileno()).st_size - NONCE_BYTES

    def write(self, offset: int, values: Tensor) -> None:
        """Write the contiguous u8[n] `values` at `offset`."""
        for start, piece in _pieces(offset, values):
            _expect(os.pwrite(self._file.fileno(), piece, start), piece)

    def clear(self) -> None:
        """Give the memory back; reading it afterwards is an error."""
        self._file.truncate(NONCE_BYTES)


def _pieces(offset: int, values: Tensor) -> Iterator[tuple[int, memoryview]]:
    """Yield places in the file and what belongs there."""
    view = memoryview(values.numpy().data)
    for start in range(0, len(view), MAX_BYTES_A_CALL):
        yield NONCE_BYTES + offset + start, view[start : start + MAX_BYTES_A_CALL]


def _expect(num_bytes: int, piece: memoryview) -> None:
    if num_bytes != len(piece):
        raise OSError(f"moved {num_bytes} bytes, expected {len(piece)}")
