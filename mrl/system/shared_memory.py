"""Memory that a child process can map, and that nobody can leave behind.

A memfd has no name in any folder: it is gone with the last process that has it open or mapped,
whoever is killed. The file in /proc is open to processes of the same user only.
"""

from __future__ import annotations

import os
import weakref

import torch


class SharedBuffer:
    """u8[num_bytes] in a memfd. On the first touch each page costs as much as copying it ten times."""

    def __init__(self, num_bytes: int) -> None:
        size = max(num_bytes, 1)  # nothing of length 0 can be mapped
        fd = os.memfd_create("mrl-weights")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, size)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self.tensor = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)


class SharedMemory:
    """Buffers that are used again and again, and grow."""

    def __init__(self) -> None:
        self._buffers: dict[int, SharedBuffer] = {}

    def take(self, num_bytes: int, number: int = 0) -> SharedBuffer:
        """At least `num_bytes`; an earlier call with this `number` may have returned this memory."""
        buffer = self._buffers.get(number)
        if buffer is None or buffer.tensor.numel() < num_bytes:
            buffer = None
            self._buffers.pop(number, None)  # first: both at once might not fit
            buffer = self._buffers[number] = SharedBuffer(num_bytes)
        return buffer
