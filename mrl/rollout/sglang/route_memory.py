"""Routes from SGLang's scheduler to the trainer through memory, past its other processes and JSON.

The scheduler lays the expert ids of a finished request into a file without a name (memfd), a byte an id
below 257 experts, and sends a `Reference` of some 100 bytes in their place; the trainer reads the file
under /proc and gives the memory back. The kernel frees the rest with the scheduler, however that ends.

The scheduler does so only where it can read the trainer's memory in turn: on the same machine, in the
same container, as the same user. What that memory holds is the number of the call of generate() in
progress: what was laid down during an earlier one has been read or never will be, and is freed. Calls
beside each other share a number: what one of them leaves unread is freed when none of them is open.

Used by mrl_route_memory.py in SGLang's processes and by the engine in the trainer.
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
"""The variable that tells the server, as JSON, how to find the trainer's memory."""
MARK = b"mrl-routes"
"""What a reference starts with: read as int32 it is no expert's number."""
MAX_BYTES = 4 << 30
"""That wait to be read. Routes beyond that go the way that SGLang sends them, as base64 in JSON."""
PAGE = 4096
CLOSED = 0
"""It stands for the number where the trainer wants nothing in memory."""
_PUNCH_HOLE, _KEEP_SIZE = 2, 1


@dataclass(frozen=True)
class Reference:
    """Says in which process's shared memory the routes of a request are."""

    pid: int
    fd: int
    offset: int
    num_bytes: int
    dtype: str
    """numpy's name."""

    def as_tensor(self) -> Tensor:
        """u8[n]: travels where SGLang sends the routes."""
        return torch.frombuffer(
            bytearray(MARK + json.dumps(asdict(self)).encode()), dtype=torch.uint8
        )


def find_reference(payload_base64: str) -> Reference | None:
    """What `as_tensor` made, after SGLang has made base64 of it; None for routes themselves."""
    if not payload_base64.startswith(_MARK_BASE64):
        return None
    return Reference(**json.loads(base64.b64decode(payload_base64)[len(MARK) :]))


_MARK_BASE64 = base64.b64encode(MARK).decode()[: len(MARK) * 8 // 6]


class RouteReader:
    """The reader is the trainer's side; each engine has one."""

    def __init__(self) -> None:
        self._memory = SharedBytes()
        self._number = CLOSED
        self._num_calls = 0
        self._counting = threading.Lock()
        self.is_open = True
        """Takes effect with the next `begin`. A reader that is not open gets base64 in JSON."""
        self.begin()
        self.num_bytes = 0
        """Read since the start."""

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that the server needs."""
        handle = self._memory.handle
        return {VARIABLE: json.dumps([handle.pid, handle.fd, handle.nonce.hex()])}

    def open_call(self) -> None:
        """Note that a call of generate() begins; any thread may."""
        with self._counting:
            if not self._num_calls:
                self.begin()
            self._num_calls += 1

    def close_call(self) -> None:
        """Note that a call of generate() is over."""
        with self._counting:
            self._num_calls -= 1

    def begin(self) -> None:
        """Start anew before a call of generate(), with none in progress."""
        self._number += 1
        self._memory.write(0, _as_bytes(self._number if self.is_open else CLOSED))

    def take(self, reference: Reference) -> np.ndarray:
        """The routes, flat, of the type that they were laid down in; their memory is freed.

        Raises RuntimeError where they cannot be read.
        """
        routes = np.empty(reference.num_bytes, dtype=np.uint8)
        try:
            file = os.open(f"/proc/{reference.pid}/fd/{reference.fd}", os.O_RDWR)
            try:
                num_bytes = _read(file, routes.data, reference.offset)
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
    """The writer is the scheduler's side. One thread uses it."""

    def __init__(self, reader: Handle, max_bytes: int = MAX_BYTES) -> None:
        self._reader = os.open(reader.path, os.O_RDONLY)
        self._max_bytes = max_bytes
        self._file = os.memfd_create("mrl-route-memory")
        self._end = 0
        self._number = -1

    def add(self, routes: Tensor) -> Reference | None:
        """int32 routes of one request; None where they have to go another way: the reader is closed,
        or too much waits. Numbers that fit are stored in one byte or two, others (the bits of gate
        weights) as they are."""
        self._free_earlier()
        if self._number == CLOSED:
            return None
        values = _narrowed(routes)
        if self.num_bytes + values.nbytes > self._max_bytes:
            return None
        offset, self._end = self._end, self._end + _whole_pages(values.nbytes)
        view = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        written = 0
        while written < len(view):  # Linux moves at most 2 GiB at once
            written += os.pwrite(self._file, view[written:], offset + written)
        return Reference(os.getpid(), self._file, offset, values.nbytes, values.dtype.name)

    @property
    def num_bytes(self) -> int:
        """That wait, in whole pages."""
        return 512 * os.fstat(self._file).st_blocks

    def _free_earlier(self) -> None:
        number = int.from_bytes(os.pread(self._reader, 8, _NUMBER_AT), "little")
        if number != self._number:
            if self._end:
                _free(self._file, 0, self._end)
            self._number = number


_NUMBER_AT = 16
"""Behind the nonce of `mrl.system.shared_memory`."""


def make_writer() -> RouteWriter | None:
    """Make the writer of a server process; None where the trainer's memory is out of its reach."""
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


def _read(file: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < len(view):
        num_bytes = os.preadv(file, [view[done:]], offset + done)
        if not num_bytes:
            break
        done += num_bytes
    return done


def _free(file: int, offset: int, num_bytes: int) -> None:
    """Give whole pages back to the system; what is read there afterwards is zero."""
    libc = ctypes.CDLL(None, use_errno=True)
    where = (ctypes.c_int64(offset), ctypes.c_int64(num_bytes))
    if num_bytes and libc.fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, *where):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
