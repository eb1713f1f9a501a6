"""Registers mapped memory with CUDA, so that GPU copies need no intermediate buffer.

CUDA copies pageable memory through its own pinned buffers, at a fraction of the bus speed.
Registering pins every page and takes about as long as one copy, so it pays off for memory that
every weight sync reuses. This module has not been run on a GPU.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor


def register(tensor: Tensor, device: torch.device | None = None) -> bool:
    """Register the memory of a contiguous CPU tensor that is not registered yet.

    `device` is the GPU in whose context the memory is registered, by default the current GPU.
    Return whether the memory is registered. If registering fails, copies are slower, and one
    warning per process gives CUDA's reason. Call `unregister` before the memory is unmapped.
    """
    try:
        with nullcontext() if device is None else torch.cuda.device(device):
            _pin(tensor.data_ptr(), tensor.nbytes)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        _warn("registered", error)
        return False
    return True


def unregister(tensor: Tensor) -> None:
    """Undo `register`. If that fails, a warning gives CUDA's reason."""
    try:
        _unpin(tensor.data_ptr())
    except (RuntimeError, AssertionError) as error:
        _warn("unregistered", error)


def _pin(address: int, num_bytes: int) -> None:
    """Pin the memory and register it with CUDA. Raises RuntimeError if CUDA refuses."""
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
    """Clear the error that CUDA's runtime has stored. Torch would raise it at the next kernel
    launch."""
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
