"""Weight buckets as the payloads of SGLang's /update_weights_from_tensor.

A bucket is one flat uint8 tensor and the place of each weight in it. On GPUs the tensor goes as a
CUDA IPC handle: no copy leaves the device. On CPUs its bytes go inside the payload: shared memory
would need a per-process torch setting, a helper process, and leaks where the trainer is killed.

SGLang unpickles with an allow-list; everything here is made of torch and builtin types, so that the
trainer never imports sglang. Nothing is ever unpickled on this side.
"""

from __future__ import annotations

import base64
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from mrl.types import WeightBucket

DEVICE_FIELD = 6
"""Where torch's reduced CUDA tensor holds its device number."""


def flatten_bucket(bucket: WeightBucket) -> tuple[Tensor, list[SimpleNamespace]]:
    """All weights of a bucket as u8[num_bytes], and where each one lies in it."""
    places, start = [], 0
    for name, tensor in bucket.tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        places.append(
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=start + num_bytes,
                numel=num_bytes,
            )
        )
        start += num_bytes
    if bucket.flat is not None:
        return bucket.flat, places
    parts = [tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in bucket.tensors]
    return torch.cat(parts), places


def serialize_bucket(flat: Tensor, places: list[SimpleNamespace], num_ranks: int) -> list[str]:
    """One base64 payload per tensor-parallel rank of the server.

    On GPUs `flat` must live until the server has answered; each rank gets a handle of its own,
    because torch counts one release per handle.
    """
    message = {"flattened_tensor": flat, "metadata": places}
    if flat.is_cuda:
        return [_encode(_dump_cuda(message)) for _ in range(num_ranks)]
    return [_encode(pickle.dumps(message))] * num_ranks


def _encode(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


def _dump_cuda(message: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    _CudaPickler(buffer).dump(message)
    return buffer.getvalue()


class _CudaPickler(ForkingPickler):
    """Names the device by UUID: its number differs where CUDA_VISIBLE_DEVICES does.

    SGLang's receiver understands both.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        rebuild, fields = reductions.reduce_tensor(obj)
        uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
        return rebuild, (*fields[:DEVICE_FIELD], uuid, *fields[DEVICE_FIELD + 1 :])
