"""Holds one version of the weights in a worker's host memory, from the transfer until the engine
loads it.

Each bucket is in a memfd of its own, which the engine's processes map. The worker needs no device
memory for a bucket, and no file remains if any process is killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrl.engines.handles import file_handle
from mrl.kernels.digest import add_digests, digests_of
from mrl.system.shared_memory import SharedMemory
from mrl.types import WeightBucket
from mrl.weight_sync.delta import apply_delta
from mrl.weight_sync.load import Canaries


@dataclass(frozen=True)
class _Base:
    """The version to which deltas are applied to make the arriving version."""

    version: int
    memory: SharedMemory
    headers: list[Mapping[str, Any]]


class Staging:
    """Host memory that holds one version of the weights at a time. Only one thread at a time may use
    a `Staging`."""

    def __init__(self, num_ranks: int = 1, device: torch.device | None = None) -> None:
        """`num_ranks` is the number of ranks of the engine, each of which maps the memory. `device`
        is this worker's GPU if buckets arrive over NCCL; then both the worker and the engine
        register the memory with CUDA."""
        self.version: int | None = None
        """The version that is held; None while it is incomplete, because it is still arriving or its
        transfer has failed."""
        self.canaries: Canaries | None = None
        self._num_ranks = num_ranks
        self._memory = SharedMemory(device)
        self._is_registered = device is not None
        self._headers: list[Mapping[str, Any]] = []
        self._arriving = -1
        self._base: _Base | None = None

    def begin(self, version: int, canaries: Canaries | None, base: Staging | None = None) -> None:
        """Forget the version that is held, and begin to receive `version`.

        `base` holds the complete version to which deltas will be applied. `base` may be this object. If
        it is another one, the contents of its memory must not change until `finish`.
        """
        self._base = None
        if base is not None:
            assert base.version is not None
            self._base = _Base(base.version, base._memory, base._headers)
        self.version, self._arriving, self.canaries = None, version, canaries
        self._headers = []

    def room(self, header: Mapping[str, Any]) -> Tensor:
        """Return memory u8[num_bytes] for the next bucket. `header` is the bucket's description
        from `header_of`."""
        self._headers.append(header)
        size = int(header["num_bytes"])
        return self._memory.take(size, len(self._headers)).tensor[:size]

    def patch(self, header: Mapping[str, Any], payload: Tensor) -> str:
        """Make the next bucket by applying a delta to the bucket of the same number in the base.

        `header` is the bucket's description from `header_of`, and also has `Delta.header` under the
        key `delta`. `payload` u8[num_bytes] has the bytes of the delta. Return an empty string if
        the resulting bucket has the digests that `header` gives. Otherwise return the reason for
        the failure. The caller must then receive the whole bucket, into the memory that `room`
        returns.
        """
        base, number, size = self._base, len(self._headers) + 1, int(header["num_bytes"])
        if base is None or number > len(base.headers):
            return f"there is no base for bucket {number}"
        if base.headers[number - 1]["tensors"] != header["tensors"]:
            return f"bucket {number} of version {base.version} has other tensors"
        flat = self._memory.take(size, number).tensor[:size]
        if base.memory is not self._memory:
            flat.copy_(base.memory.take(size, number).tensor[:size])
        try:
            apply_delta(flat, header["delta"], payload, base=base.version, bucket=number)
        except ValueError as error:
            return str(error)
        if add_digests(digests_of(_tensors(flat, header["tensors"]))) != header["sent_digest"]:
            return f"bucket {number} has another digest than in the trainer"
        self._headers.append(header)
        return ""

    def finish(self) -> None:
        """Mark the version that was arriving as complete."""
        self.version, self._base = self._arriving, None

    def buckets(self) -> Iterator[WeightBucket]:
        """Yield the buckets in the form that `PolicyEndpoint.update_weights` takes. Raises
        RuntimeError unless a version is complete."""
        if self.version is None:
            raise RuntimeError(f"weights of version {self._arriving} have not arrived completely")
        for number, header in enumerate(self._headers, start=1):
            size = int(header["num_bytes"])
            buffer = self._memory.take(size, number)
            flat = buffer.tensor[:size]
            handle = file_handle(buffer.path, size, is_registered=self._is_registered)
            yield WeightBucket(
                tensors=_tensors(flat, header["tensors"]),
                version=self.version,
                flat=flat,
                is_last=number == len(self._headers),
                shared_path=buffer.path,
                handles=(handle,) * self._num_ranks,
                digest=header["digest"],
                digest_s=float(header["digest_s"]),
            )


def header_of(bucket: WeightBucket) -> dict[str, Any]:
    """Return a bucket's description as a JSON object. It is sent before the bytes of the bucket."""
    return {
        "tensors": [
            [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in bucket.tensors
        ],
        "num_bytes": bucket.num_bytes,
        "is_last": bucket.is_last,
        "digest": bucket.digest,
        "sent_digest": bucket.sent_digest or bucket.digest,
        "digest_s": bucket.digest_s,
    }


def _tensors(flat: Tensor, places: list[list[Any]]) -> list[tuple[str, Tensor]]:
    found, start = [], 0
    for name, shape, dtype_name in places:
        dtype = getattr(torch, dtype_name)
        end = start + math.prod(shape) * dtype.itemsize
        found.append((name, flat[start:end].view(dtype).view(shape)))
        start = end
    return found
