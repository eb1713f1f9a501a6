"""Memory for emulated kernels between pages that no one may touch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 16  # of the widest vector load; cudaMalloc gives 256
_POISON = b"\xff"
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class GuardedCopies:
    """Copies of tensors; the storage of each ends where the next page may not be read or written.

    Views of one storage stay views of one copy. Up to 15 bytes lie between the end of a storage and
    that page, so that its start is aligned: they are poisoned with 0xFF, as is what lies before the
    start, and `copy_back` looks whether they still are.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._copies: dict[int, _Copy] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._copies:
                copy = _Copy(storage.data_ptr(), storage.nbytes())
                self._copies[storage.data_ptr()] = copy

    def address(self, tensor: Tensor) -> int:
        """The address of the copy's first element, 0 for a tensor without storage."""
        start = tensor.untyped_storage().data_ptr()
        if start not in self._copies:
            return 0
        return self._copies[start].address + tensor.data_ptr() - start

    def copy_back(self) -> None:
        """Write the copies into the tensors. Raises RuntimeError if a byte beside one changed."""
        for copy in self._copies.values():
            copy.copy_back()


class _Copy:
    def __init__(self, source: int, num_bytes: int) -> None:
        self._source, self._num_bytes = source, num_bytes
        num_pages = -(-num_bytes // _PAGE)
        self._map = mmap.mmap(-1, (num_pages + 2) * _PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._first, self._end = base + _PAGE, base + (num_pages + 1) * _PAGE
        self.address = (self._end - num_bytes) // _ALIGNMENT * _ALIGNMENT
        ctypes.memset(self._first, _POISON[0], num_pages * _PAGE)
        ctypes.memmove(self.address, source, num_bytes)
        for guard in (base, self._end):
            if _LIBC.mprotect(guard, _PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def copy_back(self) -> None:
        ctypes.memmove(self._source, self.address, self._num_bytes)
        after = self.address + self._num_bytes
        for start, end in ((self._first, self.address), (after, self._end)):
            found = ctypes.string_at(start, end - start)
            written = len(found) - len(found.lstrip(_POISON))
            if written < len(found):
                place = start + written - self.address
                raise RuntimeError(
                    f"byte {place} was written, of a tensor's storage of {self._num_bytes} bytes"
                )
