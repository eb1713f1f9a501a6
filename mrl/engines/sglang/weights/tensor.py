"""`rollout.weight_sync=tensor`: buckets in shared memory, through SGLang's /update_weights_from_tensor.

A bucket is sent as one flat uint8 tensor, with a description of where each weight lies in this tensor.
The request contains one handle for each rank of the engine: on GPUs a CUDA IPC handle, on CPUs the path
in /proc of a memfd of this process, which the server maps. (torch's own sharing would need a
per-process setting, a helper process and names in /dev/shm.) No weights pass through HTTP, and no
memory remains if a process is killed.

SGLang unpickles with an allow-list: torch's containers, CUDA handles, and `map_file`, which the plug-in
mrl_bucket_files adds. The trainer never imports sglang.
"""

from __future__ import annotations

import base64
import contextlib
import math
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mrl.engines.handles import file_handle, flat_of, handle_of
from mrl.engines.sglang.weights.base import Post, version_fields
from mrl.system.shared_memory import SharedMemory
from mrl.types import Handle, WeightBucket

CLOSE_TIMEOUT_S = 30.0
"""Seconds that a failed update waits for the answer to its last bucket. Loading a bucket takes about 1
s."""
NUM_BUFFERS = 2
"""Number of buffers: the server reads one while the other is written."""


class TensorPush:
    """Posts buckets. The server loads a bucket while the caller builds the next one.

    SGLang answers when every rank has copied the bucket into its weights. The next bucket is posted
    after that answer, so the server loads one bucket at a time.
    """

    needs_session = True

    def __init__(self, post: Post, num_ranks: int, folder: Path | None = None) -> None:
        self._post = post
        self._num_ranks = num_ranks
        self._memory = SharedMemory()
        self._answer: Future[Any] | None = None
        self._number = 0

    def push(self, bucket: WeightBucket) -> None:
        flat = flat_of(bucket)
        handles = bucket.handles or self._own_handles(bucket, flat)
        if len(handles) != self._num_ranks:
            raise RuntimeError(
                f"update_weights: got handles of {len(handles)} ranks, expected one for each of the "
                f"engine's {self._num_ranks}"
            )
        body = {
            "serialized_named_tensors": serialize_bucket(places_in(bucket), handles),
            "load_format": "flattened_bucket",
            **version_fields(bucket),
        }
        self.finish()
        self._answer = in_thread(lambda: self._post("/update_weights_from_tensor", body))

    def finish(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.result()
            self.settle()

    def settle(self) -> None:
        """Free the CUDA handles that every rank has released. Until then the handles keep the trainer's
        buffer alive."""
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def close(self) -> None:
        # The server may still be reading; a failed update is over when it has answered.
        answer, self._answer = self._answer, None
        if answer is not None:
            with contextlib.suppress(Exception):  # the earlier error is the one to report
                answer.result(timeout=CLOSE_TIMEOUT_S)
        self._memory = SharedMemory()

    def _own_handles(self, bucket: WeightBucket, flat: Tensor) -> Sequence[Handle]:
        """Return handles, one for each rank, to a bucket that came without handles."""
        if flat.is_cuda:
            if self._num_ranks > 1:
                raise RuntimeError(
                    f"update_weights: got a bucket on {flat.device} without handles, and the engine "
                    f"spans {self._num_ranks} GPUs, each of which must read a copy of its own; give "
                    "buckets that went through mrl.weight_sync.engine_group.GatheredBuckets"
                )
            return [handle_of(flat, None)]
        path = bucket.shared_path
        if path is None:
            self._number = (self._number + 1) % NUM_BUFFERS
            buffer = self._memory.take(flat.numel(), self._number)
            buffer.tensor[: flat.numel()].copy_(flat)
            path = buffer.path
        # All ranks of an engine on CPUs are on this machine, and read the same file.
        return [file_handle(path, flat.numel())] * self._num_ranks


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Run a function in a daemon thread, so that the process can exit while a request hangs."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="mrl-weights", daemon=True).start()
    return future


def places_in(bucket: WeightBucket) -> list[SimpleNamespace]:
    """Return SGLang's description of each weight in the bucket's flat tensor u8[num_bytes]."""
    places, start = [], 0
    for name, tensor in bucket.tensors:
        places.append(place_of(name, tensor.shape, tensor.dtype, start))
        start = places[-1].end_idx
    return places


def place_of(name: str, shape: Sequence[int], dtype: torch.dtype, start: int) -> SimpleNamespace:
    """Return SGLang's description of a tensor that begins at byte `start` of a flat u8 buffer."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return SimpleNamespace(
        name=name,
        shape=torch.Size(shape),
        dtype=dtype,
        start_idx=start,
        end_idx=start + num_bytes,
        numel=num_bytes,
    )


def serialize_bucket(places: list[SimpleNamespace], handles: Sequence[Handle]) -> list[str]:
    """Return one base64 payload for each of `handles`, in the order of the engine's ranks.

    Every payload also has `places`, SGLang's descriptions of the weights in the flat tensor. SGLang's
    rank r opens only the payload with index r (`TpModelWorker.deserialize_own_rank` in 0.5.23,
    `update_weights_from_tensor` in 0.5.12). The index is tp_rank, even with expert parallelism and DP
    attention, which divide the same ranks.
    """
    messages = ({"flattened_tensor": _Opens(handle), "metadata": places} for handle in handles)
    return [base64.b64encode(pickle.dumps(message)).decode() for message in messages]


class _Opens:
    """An object that is pickled as a handle, so that unpickling it opens the handle's tensor."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __reduce__(self) -> Any:
        return self._handle
