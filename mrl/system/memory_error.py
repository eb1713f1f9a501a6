"""Tells errors for want of memory from others, and carries with them who held how much."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Where = Literal["device", "host"]
_OF_DEVICE = re.compile(
    r"(CUDA|HIP) out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|cudaMalloc|"
    r"CUBLAS_STATUS_ALLOC_FAILED|Failed to CUDA (malloc|calloc)|Cuda failure '?out of memory"
)
"""What torch, cuBLAS and NCCL call it on a GPU."""
_OF_HOST = re.compile(
    r"can't allocate memory|Cannot allocate memory|not enough memory: you tried to allocate|"
    r"std::bad_alloc|Unable to allocate .* for an array"
)
"""What torch, Linux, C++ and numpy call it on the host."""
_ATTRIBUTE = "__mrl_bytes__"


def out_of_memory(error: BaseException) -> Where | None:
    """Return whose memory did not suffice, by this error alone; None where it is another error."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or _OF_DEVICE.search(text):
        return "device"
    is_host = isinstance(error, MemoryError) or _OF_HOST.search(text)
    if is_host or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    return None


@contextmanager
def noting_bytes(held: Callable[[], str]) -> Iterator[None]:
    """Add to an error for want of memory that leaves the block who held how much, `held()` in words."""
    try:
        yield
    except Exception as error:
        chain: BaseException | None = error
        while chain is not None:
            if out_of_memory(chain):
                setattr(error, _ATTRIBUTE, held())
                break
            chain = chain.__cause__ or chain.__context__
        raise


def noted_bytes(error: BaseException) -> str:
    """Return what `noting_bytes` added; empty where it added nothing."""
    return getattr(error, _ATTRIBUTE, "")
