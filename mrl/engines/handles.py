"""Weight buckets as flat tensors, and handles with which another process on this machine opens them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from mrl.system.mapped_file import map_file, map_registered_file
from mrl.types import Handle, WeightBucket

DEVICE_FIELD = 6
"""The index of the device among the fields to which torch reduces a CUDA tensor
(torch/multiprocessing/reductions.py)."""


def handle_of(flat: Tensor | None, path: str | None) -> Handle:
    """Wait until the device has written `flat` u8[num_bytes], and return a handle to it.

    On GPUs a handle can be opened only once. On CPUs, `path` is a file that starts with the bytes of
    `flat`. Raises ValueError if the bytes are not in memory that can be shared: if `flat` is None, or
    is on the CPU without a `path`.
    """
    if flat is None or not (flat.is_cuda or path):
        raise ValueError(
            "update_weights: got a bucket whose tensors do not lie end to end in shared memory; "
            "expected one from parallel.export, as an engine of several ranks needs it"
        )
    if not flat.is_cuda:
        assert path is not None
        return file_handle(path, flat.numel())
    torch.cuda.current_stream(flat.device).synchronize()
    # Each handle adds a wrapper with a CUDA event to its storage. On the storage of the trainer's
    # buffer the wrappers would accumulate until the buffer is freed; on a new storage they are freed as
    # soon as the engine releases it (torch/csrc/StorageSharing.cpp, THPStorage_shareCuda;
    # CudaIPCTypes.cpp).
    rebuild, fields = reductions.reduce_tensor(torch.from_dlpack(flat))
    # Name the device by its UUID, because its number depends on CUDA_VISIBLE_DEVICES. SGLang
    # understands both.
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    return rebuild, (*fields[:DEVICE_FIELD], uuid, *fields[DEVICE_FIELD + 1 :])


def file_handle(path: str, num_bytes: int, *, is_registered: bool = False) -> Handle:
    """Return a handle to the first `num_bytes` of a file, which another process maps. With
    `is_registered`, that process keeps the file mapped from one weight sync to the next, and registers
    the memory with CUDA."""
    return (map_registered_file if is_registered else map_file), (path, num_bytes)


def flat_of(bucket: WeightBucket) -> Tensor:
    """Return the bucket's tensors concatenated as u8[num_bytes]. This is `bucket.flat`, or a new tensor
    if `bucket.flat` is None."""
    if bucket.flat is not None:
        return bucket.flat
    parts = [tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in bucket.tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
