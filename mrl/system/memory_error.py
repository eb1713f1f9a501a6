"""Recognises out-of-memory errors, and attaches to each a text that says what used the memory."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from mrl.system.disk import chain

Where = Literal["device", "host"]
_OF_DEVICE = re.compile(
    r"(CUDA|HIP) out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|cudaMalloc|"
    r"CUBLAS_STATUS_ALLOC_FAILED|Failed to CUDA (malloc|calloc)|Cuda failure '?out of memory"
)
"""Matches the messages with which torch, cuBLAS and NCCL report that GPU memory is exhausted."""
_OF_HOST = re.compile(
    r"can't allocate memory|Cannot allocate memory|not enough memory: you tried to allocate|"
    r"std::bad_alloc|Unable to allocate .* for an array"
)
"""Matches the messages with which torch, Linux, C++ and numpy report that host memory is exhausted."""
_ATTRIBUTE = "__mrl_bytes__"


def out_of_memory(error: BaseException) -> Where | None:
    """Return which memory an out-of-memory error is about, `device` (a GPU) or `host`.

    The result is None for any other kind of error.
    """
    try:
        text = str(error)
    except Exception:  # that of a user's class of errors
        text = ""
    if isinstance(error, torch.OutOfMemoryError) or _OF_DEVICE.search(text):
        return "device"
    is_host = isinstance(error, MemoryError) or _OF_HOST.search(text)
    if is_host or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    return None


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: allocated on a GPU or, for the CPU, resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def noting_bytes(held: Callable[[], str]) -> Iterator[None]:
    """Attach the text `held()` to an out-of-memory error that leaves the `with` block.

    The text says what used how much memory. It is also attached to an error that was caused by an
    out-of-memory error.
    """
    try:
        yield
    except Exception as error:
        if any(out_of_memory(each) for each in chain(error)):
            setattr(error, _ATTRIBUTE, held())
        raise


def noted_bytes(error: BaseException) -> str:
    """Return the text that `noting_bytes` attached; empty if it attached none."""
    return getattr(error, _ATTRIBUTE, "")
