"""Weight buckets by way of SGLang's /update_weights_from_tensor: `rollout.weight_sync=tensor`.

A bucket is one flat uint8 tensor and the place of each weight in it. What is posted is a handle for
each rank of the engine: on GPUs CUDA IPC's, on CPUs the path of a memfd of ours in /proc, which the
server maps. (torch's own sharing would need a per-process setting, a helper process and names in
/dev/shm.) No bytes pass through HTTP, and nothing is left behind whoever is killed.

SGLang unpickles with an allow-list: torch's containers and CUDA handles, and `map_file`, which the
plug-in mrl_bucket_files adds. The trainer never imports sglang.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mrl.rollout.engine_group import file_handle, handle_of
from mrl.system.shared_memory import SharedMemory
from mrl.types import Handle, WeightBucket

Post = Callable[[str, dict[str, Any]], Any]
"""Path and body to the decoded answer."""
CLOSE_TIMEOUT_S = 30.0
"""The wait for the answer to the last bucket of a failed update: a load takes about a second."""
NUM_BUFFERS = 2
"""One that the server reads, and one that is written meanwhile."""


class TensorPush:
    """Posts a bucket and leaves the server to load it while the caller builds the next one.

    SGLang answers when every rank has copied the bucket into its weights: the next bucket is posted
    after that, so only the last one is ever on its way.
    """

    def __init__(self, post: Post, num_ranks: int) -> None:
        self._post = post
        self._num_ranks = num_ranks
        self._memory = SharedMemory()
        self._answer: Future[Any] | None = None
        self._number = 0

    def push(self, bucket: WeightBucket) -> None:
        flat, places = flatten_bucket(bucket)
        handles = bucket.handles or self._own_handles(bucket, flat)
        if len(handles) != self._num_ranks:
            raise RuntimeError(
                f"update_weights: got handles of {len(handles)} ranks, expected one for each of the "
                f"engine's {self._num_ranks}"
            )
        body = {
            "serialized_named_tensors": serialize_bucket(places, handles),
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
        """Free the handles that every rank has let go of; they hold the trainer's buffer."""
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def close(self) -> None:
        # The server may still be reading: a failed update is over when it has answered.
        answer, self._answer = self._answer, None
        if answer is not None:
            with contextlib.suppress(Exception):  # the error that led here is the one to report
                answer.result(timeout=CLOSE_TIMEOUT_S)
        self._memory = SharedMemory()

    def _own_handles(self, bucket: WeightBucket, flat: Tensor) -> Sequence[Handle]:
        """Return handles of a bucket that this process alone has."""
        if flat.is_cuda:
            if self._num_ranks > 1:
                raise RuntimeError(
                    f"update_weights: got a bucket on {flat.device} without handles, and the engine "
                    f"spans {self._num_ranks} GPUs, each of which must read a copy of its own; give "
                    "buckets that went through mrl.rollout.engine_group.GatheredBuckets"
                )
            return [handle_of(flat, None)]
        path = bucket.shared_path
        if path is None:
            self._number = (self._number + 1) % NUM_BUFFERS
            buffer = self._memory.take(flat.numel(), self._number)
            buffer.tensor[: flat.numel()].copy_(flat)
            path = buffer.path
        # The engine's ranks are on this machine's CPU, where all can read one file.
        return [file_handle(path, flat.numel())] * self._num_ranks


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """A daemon: an exit must not wait for a request or a collective that hangs."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="mrl-weights", daemon=True).start()
    return future


def version_fields(bucket: WeightBucket) -> dict[str, Any]:
    """Return the fields by which the last bucket names the version. The engine drops the prefix cache
    itself: SGLang dies when it is told to do so with requests in flight."""
    version = {"weight_version": str(bucket.version)} if bucket.is_last else {}
    return {"flush_cache": False, **version}


def flatten_bucket(bucket: WeightBucket) -> tuple[Tensor, list[SimpleNamespace]]:
    """The bucket as u8[num_bytes], and where each one lies in it."""
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


def serialize_bucket(places: list[SimpleNamespace], handles: Sequence[Handle]) -> list[str]:
    """Serialise one base64 payload for each of `handles`, in the order of the engine's ranks.

    SGLang's rank r opens the payload of index r alone (`TpModelWorker.deserialize_own_rank` in 0.5.23,
    `update_weights_from_tensor` in 0.5.12: the index is tp_rank, with expert parallelism and DP
    attention too, which share out the same ranks).
    """
    messages = ({"flattened_tensor": _Opens(handle), "metadata": places} for handle in handles)
    return [base64.b64encode(pickle.dumps(message)).decode() for message in messages]


class _Opens:
    """Unpickles as the tensor that a handle opens."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __reduce__(self) -> Any:
        return self._handle
