"""Weight buckets by way of SGLang's /update_weights_from_tensor: `rollout.weight_sync=tensor`.

A bucket is one flat uint8 tensor and the place of each weight in it. What is posted is a handle: on
GPUs CUDA IPC's, on CPUs the path of a memfd of ours in /proc, which the server maps read-only by
calling torch.from_file itself. (torch's own sharing would need a per-process setting, a helper process
and names in /dev/shm.) No bytes pass through HTTP, and nothing is left behind whoever is killed.

SGLang unpickles with an allow-list; everything here is made of torch and builtin types, so that the
trainer never imports sglang. Nothing is ever unpickled on this side.
"""

from __future__ import annotations

import base64
import functools
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from mrl.shared_memory import SharedMemory
from mrl.types import WeightBucket

Post = Callable[[str, dict[str, Any]], Any]
"""Path and body to the decoded answer."""
DEVICE_FIELD = 6
"""Where torch's reduced CUDA tensor holds its device number."""


class TensorPush:
    """Posts one bucket at a time. SGLang answers when every rank has copied it into its weights."""

    def __init__(self, post: Post, num_ranks: int) -> None:
        self._post = post
        self._num_ranks = num_ranks
        self._memory = SharedMemory()

    def push(self, bucket: WeightBucket) -> None:
        flat, places = flatten_bucket(bucket)
        path = bucket.shared_path
        if path is None and not flat.is_cuda:
            buffer = self._memory.take(flat.numel())
            buffer.tensor[: flat.numel()].copy_(flat)
            path = buffer.path
        payloads = serialize_bucket(flat, places, path, self._num_ranks)
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
        self._post(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": payloads,
                "load_format": "flattened_bucket",
                **version_fields(bucket),
            },
        )
        self.settle()

    def settle(self) -> None:
        """Free the handles that every rank has let go of; they hold the trainer's buffer."""
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def close(self) -> None:
        self._memory = SharedMemory()


def version_fields(bucket: WeightBucket) -> dict[str, Any]:
    """The last bucket names the version. The prefix cache is the engine's business: with requests in
    flight SGLang dies of being told to drop it."""
    version = {"weight_version": str(bucket.version)} if bucket.is_last else {}
    return {"flush_cache": False, **version}


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
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8), places


def serialize_bucket(
    flat: Tensor, places: list[SimpleNamespace], path: str | None, num_ranks: int
) -> list[str]:
    """One base64 payload per tensor-parallel rank of the server.

    `path` is of the file that starts with `flat`, for a tensor on a CPU. On GPUs `flat` must live until
    the server has answered; each rank gets a handle of its own, because torch counts one release per
    handle.
    """
    if not flat.is_cuda:
        assert path is not None
        message = {"flattened_tensor": _MappedBytes(path, flat.numel()), "metadata": places}
        return [_encode(pickle.dumps(message))] * num_ranks
    # Each handle wraps the pointer of a storage once more, with a CUDA event. On the trainer's buffer
    # they would pile up until it is freed; on a storage of their own they go as soon as the rank lets
    # go (torch/csrc/StorageSharing.cpp, THPStorage_shareCuda; CudaIPCTypes.cpp).
    messages = (
        {"flattened_tensor": torch.from_dlpack(flat), "metadata": places} for _ in range(num_ranks)
    )
    return [_encode(_dump_cuda(message)) for message in messages]


class _MappedBytes:
    """Unpickles as u8[size], the start of a file, mapped copy-on-write: writes stay in that process."""

    def __init__(self, path: str, size: int) -> None:
        self._path = path
        self._size = size

    def __reduce__(self) -> Any:
        mapped = functools.partial(
            torch.from_file, shared=False, size=self._size, dtype=torch.uint8
        )
        return mapped, (self._path,)


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
