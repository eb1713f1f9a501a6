"""Which errors are for want of memory, and whose."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from mrl.system.memory_error import noted_bytes, noting_bytes, out_of_memory


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "device"),
        (RuntimeError("CUDA error: out of memory"), "device"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
            "device",
        ),
        (
            RuntimeError("NCCL error: ncclUnhandledCudaError: Failed to CUDA calloc 1 bytes"),
            "device",
        ),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (RuntimeError("std::bad_alloc"), "host"),
        (RuntimeError("boom"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
    ],
)
def test_words(error: Exception, where: str | None) -> None:
    assert out_of_memory(error) == where


def test_what_torch_and_numpy_really_say() -> None:
    for allocate in (lambda: torch.empty(1 << 60), lambda: np.empty(1 << 45)):
        with pytest.raises((RuntimeError, MemoryError, ValueError)) as caught:
            allocate()
        assert out_of_memory(caught.value) == "host", caught.value


def test_bytes_are_noted_for_want_of_memory_alone() -> None:
    for inner, text in ((MemoryError(), "weights 1 GB"), (ValueError(), "")):
        with pytest.raises(RuntimeError) as caught, noting_bytes(lambda: "weights 1 GB"):
            raise RuntimeError("a worker failed") from inner
        assert noted_bytes(caught.value) == text
