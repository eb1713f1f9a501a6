"""Registers mapped memory with CUDA, so that a GPU copies to and from it without a copy in between.

CUDA moves pageable memory through pinned buffers of its own, at a fraction of the speed of the bus.
Registering pins every page, which takes about as long as copying it once: it is for memory that is used
again in every weight sync. This has not run on a GPU.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor


def register(tensor: Tensor, device: torch.device | None = None) -> bool:
    """Register the memory of a contiguous CPU tensor, which must not be registered yet.

    `device`: the GPU whose context does it; None for the current one. Returns whether it is registered:
    a failure costs speed and is one warning with CUDA's reason, once a process. Call `unregister`
    before the memory is unmapped.
    """
    try:
        with nullcontext() if device is None else torch.cuda.device(device):
            _pin(tensor.data_ptr(), tensor.nbytes)
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without CUDA
        _warn("registered", error)
        return False
    return True


def unregister(tensor: Tensor) -> None:
    """Undo `register`; a failure is one warning."""
    try:
        _unpin(tensor.data_ptr())
    except (RuntimeError, AssertionError) as error:
        _warn("unregistered", error)


def _pin(address: int, num_bytes: int) -> None:
    """Raise RuntimeError where CUDA refuses."""
    cudart: Any = torch.cuda.cudart()
    code = cudart.cudaHostRegister(address, num_bytes, 0)
    try:
        torch.cuda.check_error(code)
    except RuntimeError:
        _clear_error()
        raise


def _unpin(address: int) -> None:
    cudart: Any = torch.cuda.cudart()
    code = cudart.cudaHostUnregister(address)
    try:
        torch.cuda.check_error(code)
    except RuntimeError:
        _clear_error()
        raise


def _clear_error() -> None:
    """Take the error out of CUDA's runtime, where torch's next launch would find it and raise."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _warn(what: str, error: BaseException) -> None:
    lines = str(error).splitlines() or [repr(error)]
    warnings.warn(
        f"shared memory could not be {what} with CUDA, so copies of weights to the GPU are slower: "
        f"{lines[0]}",
        RuntimeWarning,
        stacklevel=3,
    )
