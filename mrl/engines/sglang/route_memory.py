"""Routes go from SGLang's scheduler to the trainer through memory instead of other processes and JSON.

The scheduler writes the expert ids of a finished request into a file without a name (memfd), with one
byte per id if the model has at most 256 experts, and sends a `Reference` of about 100 bytes instead.
The trainer reads the file under /proc and frees the memory. When the scheduler ends, for whatever
reason, the kernel frees the rest.

The scheduler does this only if it can also read the trainer's memory: on the same machine, in the
same container, as the same user. The trainer's memory contains the sequence number of the current
call of generate(). Routes that were written during an earlier call have been read or never will be,
so the scheduler frees them. Concurrent calls share a number, so routes that one of them never reads
are freed only after all of them have ended.

This module is used by mrl_route_memory.py in SGLang's processes, and by the engine in the trainer's
process.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import threading
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from mrl.system.shared_memory import Handle, SharedBytes

VARIABLE = "MRL_ROUTE_READER"
"""The environment variable that tells the server how to open the trainer's memory, as JSON."""
MARK = b"mrl-routes"
"""The first bytes of a reference. As int32 numbers, none of them is a valid expert id."""
MAX_BYTES = 4 << 30
"""The most bytes that may wait to be read. Beyond that, routes are sent as base64 in JSON, as SGLang
does without this module."""
PAGE = 4096
CLOSED = 0
"""Written in place of the call number while the trainer wants routes as base64 in JSON."""
_PUNCH_HOLE, _KEEP_SIZE = 2, 1


@dataclass(frozen=True)
class Reference:
    """Where the routes of one request lie: a range of bytes in a file that process `pid` has open as
    `fd`."""

    pid: int
    fd: int
    offset: int
    num_bytes: int
    dtype: str
    """numpy's name of the dtype in which the ids are stored."""

    def as_tensor(self) -> Tensor:
        """Return the reference as u8[n], which SGLang sends instead of the routes."""
        return torch.frombuffer(
            bytearray(MARK + json.dumps(asdict(self)).encode()), dtype=torch.uint8
        )


def find_reference(payload_base64: str) -> Reference | None:
    """Return the reference that SGLang sent as base64; None if it sent the routes themselves."""
    if not payload_base64.startswith(_MARK_BASE64):
        return None
    return Reference(**json.loads(base64.b64decode(payload_base64)[len(MARK) :]))


_MARK_BASE64 = base64.b64encode(MARK).decode()[: len(MARK) * 8 // 6]


class RouteReader:
    """Reads routes in the trainer, which has one reader for each engine."""

    def __init__(self) -> None:
        self._memory = SharedBytes()
        self._number = CLOSED
        self._num_calls = 0
        self._counting = threading.Lock()
        self.is_open = True
        """Whether routes come through memory; otherwise they come as base64 in JSON. A change takes
        effect with the next `begin`."""
        self.begin()
        self.num_bytes = 0
        """Number of bytes of routes that this reader has read so far."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the server needs."""
        handle = self._memory.handle
        return {VARIABLE: json.dumps([handle.pid, handle.fd, handle.nonce.hex()])}

    def open_call(self) -> None:
        """Record that a call of generate() begins. Any thread may call this."""
        with self._counting:
            if not self._num_calls:
                self.begin()
            self._num_calls += 1

    def close_call(self) -> None:
        """Record that a call of generate() has ended."""
        with self._counting:
            self._num_calls -= 1

    def begin(self) -> None:
        """Advance to the next call number. Must be called while no call of generate() is open."""
        self._number += 1
        self._memory.write(0, _as_bytes(self._number if self.is_open else CLOSED))

    def take(self, reference: Reference) -> np.ndarray:
        """Return the routes as a flat array of the dtype in which they were written, and free their
        memory.

        Raises RuntimeError if they cannot be read.
        """
        routes = np.empty(reference.num_bytes, dtype=np.uint8)
        try:
            file = os.open(f"/proc/{reference.pid}/fd/{reference.fd}", os.O_RDWR)
            try:
                num_bytes = os.preadv(file, [routes.data], reference.offset)
                _free(file, reference.offset, _whole_pages(reference.num_bytes))
            finally:
                os.close(file)
        except OSError as error:
            raise RuntimeError(
                f"routes in the memory of process {reference.pid}: {error}"
            ) from error
        if num_bytes != reference.num_bytes:
            raise RuntimeError(
                f"routes in the memory of process {reference.pid}: got {num_bytes} bytes, expected "
                f"{reference.num_bytes}"
            )
        self.num_bytes += num_bytes
        return routes.view(reference.dtype)


class RouteWriter:
    """Writes routes in a scheduler. Only one thread may use it."""

    def __init__(self, reader: Handle, max_bytes: int = MAX_BYTES) -> None:
        self._reader = os.open(reader.path, os.O_RDONLY)
        self._max_bytes = max_bytes
        self._file = os.memfd_create("mrl-route-memory")
        self._end = 0
        self._number = -1

    def add(self, routes: Tensor) -> Reference | None:
        """Write the int32 routes of one request, and return a reference to them. Return None if the
        trainer wants routes as JSON now, or if too many bytes wait to be read.

        The numbers are stored in one or two bytes each if all of them fit. Otherwise, as with the bits
        of gate weights, they stay int32.
        """
        self._free_earlier()
        if self._number == CLOSED:
            return None
        values = _narrowed(routes)
        if self.num_bytes + values.nbytes > self._max_bytes:
            return None
        offset, self._end = self._end, self._end + _whole_pages(values.nbytes)
        _write(self._file, offset, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        return Reference(os.getpid(), self._file, offset, values.nbytes, values.dtype.name)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file that wait to be read or freed, in whole pages."""
        return 512 * os.fstat(self._file).st_blocks

    def _free_earlier(self) -> None:
        number = int.from_bytes(os.pread(self._reader, 8, _NUMBER_AT), "little")
        if number != self._number:
            if self._end:
                _free(self._file, 0, self._end)
            self._number = number


_NUMBER_AT = 16
"""Offset in bytes of the call number in the trainer's memory, after the nonce of
`mrl.system.shared_memory`."""


def make_writer() -> RouteWriter | None:
    """Return a writer of routes for this server process; None if this process cannot read the trainer's
    memory."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    pid, fd, nonce = json.loads(text)
    reader = Handle(pid, fd, bytes.fromhex(nonce))
    return RouteWriter(reader) if reader.can_be_read() else None


def _narrowed(routes: Tensor) -> np.ndarray:
    if routes.numel():
        low, high = (int(edge) for edge in routes.aminmax())
        for dtype, largest in ((torch.uint8, 0xFF), (torch.uint16, 0xFFFF)):
            if low >= 0 and high <= largest:
                return routes.to(dtype).numpy()
    return routes.numpy()


def _as_bytes(number: int) -> Tensor:
    return torch.frombuffer(bytearray(number.to_bytes(8, "little")), dtype=torch.uint8)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _write(file: int, offset: int, data: memoryview) -> None:
    """Write all of `data`, of which one call writes at most 2 GiB."""
    while data:
        num_bytes = os.pwrite(file, data, offset)
        data, offset = data[num_bytes:], offset + num_bytes


_LIBC = ctypes.CDLL(None, use_errno=True)


def _free(file: int, offset: int, num_bytes: int) -> None:
    """Free whole pages of a file; reads of them return zeros afterwards."""
    where = (ctypes.c_int64(offset), ctypes.c_int64(num_bytes))
    if num_bytes and _LIBC.fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, *where):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
