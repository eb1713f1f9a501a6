"""This module holds a model in the host's memory, between the trainer that sends it and an engine.

Each bucket lies in a memfd of its own, which the engine's processes map by themselves: the worker needs
no memory of the device for it, and nothing is left behind whoever is killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrl.rollout.engine_group import file_handle, registered_file_handle
from mrl.system.shared_memory import SharedMemory
from mrl.types import WeightBucket


@dataclass(frozen=True)
class Canaries:
    """Token sequences i64[T], and the log-probs f32[T] that the trainer gives to them."""

    sequences: list[Tensor]
    logprobs: list[Tensor]


class Staging:
    """A `Staging` holds one version of the weights at a time. It is for one thread at a time."""

    def __init__(self, num_ranks: int = 1, device: torch.device | None = None) -> None:
        """`num_ranks`: the ranks of the engine, each of which maps the memory. `device`: the GPU that
        buckets come from, if they come over NCCL; both sides register the memory with CUDA then."""
        self.version: int | None = None
        """The version that is here whole; None while one comes, and where one came in part."""
        self.canaries: Canaries | None = None
        self._num_ranks = num_ranks
        self._memory = SharedMemory(device)
        self._handle = file_handle if device is None else registered_file_handle
        self._headers: list[Mapping[str, Any]] = []
        self._coming = -1

    def begin(self, version: int, canaries: Canaries | None) -> None:
        """Forget the version that is here and make room for another one."""
        self.version, self._coming, self.canaries = None, version, canaries
        self._headers = []

    def room(self, header: Mapping[str, Any]) -> Tensor:
        """Return u8[num_bytes] for the next bucket, which `header` describes."""
        self._headers.append(header)
        size = int(header["num_bytes"])
        return self._memory.take(size, len(self._headers)).tensor[:size]

    def finish(self) -> None:
        """Say that all buckets are here."""
        self.version = self._coming

    def buckets(self) -> Iterator[WeightBucket]:
        """Yield the buckets as `RolloutEngine.update_weights` takes them. Raises RuntimeError where no
        version is here whole."""
        if self.version is None:
            raise RuntimeError(f"weights of version {self._coming} have not come whole")
        for number, header in enumerate(self._headers, start=1):
            size = int(header["num_bytes"])
            buffer = self._memory.take(size, number)
            flat = buffer.tensor[:size]
            handles = tuple(self._handle(buffer.path, size) for _ in range(self._num_ranks))
            yield WeightBucket(
                tensors=_tensors(flat, header["tensors"]),
                version=self.version,
                flat=flat,
                is_last=number == len(self._headers),
                shared_path=buffer.path,
                handles=handles,
                digest=header["digest"],
                digest_s=float(header["digest_s"]),
            )


def header_of(bucket: WeightBucket) -> dict[str, Any]:
    """Return what describes a bucket, JSON-able."""
    return {
        "tensors": [
            [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in bucket.tensors
        ],
        "num_bytes": bucket.num_bytes,
        "is_last": bucket.is_last,
        "digest": bucket.digest,
        "digest_s": bucket.digest_s,
    }


def flat_of(bucket: WeightBucket) -> Tensor:
    """Return the bucket's tensors end to end, u8[num_bytes]."""
    if bucket.flat is not None:
        return bucket.flat[: bucket.num_bytes]
    parts = [t.detach().contiguous().view(-1).view(torch.uint8) for _, t in bucket.tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _tensors(flat: Tensor, places: list[list[Any]]) -> list[tuple[str, Tensor]]:
    found, start = [], 0
    for name, shape, dtype_name in places:
        dtype = getattr(torch, dtype_name)
        end = start + math.prod(shape) * dtype.itemsize
        found.append((name, flat[start:end].view(dtype).view(shape)))
        start = end
    return found
