"""The encoding `rollout.weight_encoding: delta`, which sends only those elements of the weights whose
bits have changed since the previous version.

The trainer keeps the bytes of the version that it exported last, and compares the next version with
them. A worker that holds the previous version makes a copy of it, and writes the changed elements
into the copy. Before an engine loads the result, the worker checks the bytes of each delta by a
checksum, and each resulting bucket by digests that the trainer computed. If a check fails, the
trainer sends the whole bucket.

The format of the bytes is in `mrl.kernels.weight_delta`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mrl.engines.handles import flat_of
from mrl.kernels import weight_delta
from mrl.types import WeightBucket

WORTH = 0.75
"""A delta is sent only if its size is at most this share of the bucket's size in bytes. A larger delta
would save too little for the time that it takes to make and to apply it."""


@dataclass(frozen=True)
class Delta:
    """The elements of one bucket that changed since the previous version."""

    base: int
    """The version to which the delta is applied."""
    bucket: int
    """The number of the bucket in its version; the first is 1."""
    element_size: int
    """Bytes of an element: 1, 2, 4 or 8."""
    payload: Tensor
    """u8[num_bytes] on the CPU, in the format of `mrl.kernels.weight_delta`."""

    def header(self) -> dict[str, Any]:
        """Return everything but the payload, as a JSON object. It also has the payload's checksum."""
        return {
            "base": self.base,
            "bucket": self.bucket,
            "element_size": self.element_size,
            "num_bytes": self.payload.numel(),
            "checksum": _checksum(self.payload),
        }


def apply_delta(
    flat: Tensor, delta: Mapping[str, Any], payload: Tensor, *, base: int, bucket: int
) -> None:
    """Apply a delta in place: turn bucket number `bucket` of version `base` into the same bucket of the
    newer version.

    flat: u8[num_bytes], the bytes of the bucket. delta: the result of `Delta.header`. payload:
    u8[delta["num_bytes"]], the bytes of the delta. Raises ValueError if the delta is for another
    version or bucket, or is damaged; `flat` may then be a mixture of both versions.
    """
    if (delta["base"], delta["bucket"]) != (base, bucket):
        raise ValueError(
            f"delta: got one for bucket {delta['bucket']} of version {delta['base']}, expected bucket "
            f"{bucket} of version {base}"
        )
    if (found := _checksum(payload)) != delta["checksum"]:
        raise ValueError(f"delta: got checksum {found:08x}, expected {delta['checksum']:08x}")
    weight_delta.apply(flat, payload, delta["element_size"])


def _checksum(payload: Tensor) -> int:
    """Return the CRC-32 of the bytes u8[num_bytes], which are on the CPU."""
    return zlib.crc32(payload.numpy().data)


class LastVersion:
    """The bytes of the version that a trainer rank exported last, in host memory."""

    def __init__(self) -> None:
        self.version: int | None = None
        """The version whose bytes are held; None while they are incomplete."""
        self._next = -1
        self._layouts: list[list[Any]] = []
        """For each bucket, the (name, shape, dtype) of each of its tensors."""
        self._bytes: list[Tensor] = []
        """u8[num_bytes] of each bucket, on the CPU."""
        self._base: int | None = None
        self._number = 0

    def begin(self, version: int) -> None:
        """Begin the new version `version`, which will overwrite the version that is held."""
        self._base, self.version, self._next, self._number = self.version, None, version, 0

    def replace(self, bucket: WeightBucket, traffic: Traffic, *, wants_delta: bool) -> Delta | None:
        """Overwrite the next held bucket with `bucket`. If `wants_delta`, return the delta that
        turns the held bucket into `bucket`. Return None without `wants_delta`, if there is no such
        delta, or if the delta would be too large (`WORTH`).

        There is no delta for a bucket without digests, because a worker could not check the result.
        """
        flat, number, self._number = flat_of(bucket), self._number, self._number + 1
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in bucket.tensors]
        is_known = number < len(self._bytes) and self._layouts[number] == layout
        if not is_known:
            del self._layouts[number:], self._bytes[number:]
            self._layouts.append(layout)
            self._bytes.append(torch.empty(flat.numel(), dtype=torch.uint8))
        held = self._bytes[number]
        if is_known and wants_delta and self._base is not None and bucket.digest is not None:
            size = _element_size(bucket)
            payload, num_changed = weight_delta.encode(held, flat, size, int(WORTH * flat.numel()))
            traffic.num_changed += num_changed
            traffic.num_compared += flat.numel() // size
            if payload is not None:
                weight_delta.apply(held, payload, size)
                return Delta(self._base, number + 1, size, payload)
        held.copy_(flat)
        return None

    def finish(self) -> None:
        """Mark the version that was begun as complete."""
        self.version = self._next


def _element_size(bucket: WeightBucket) -> int:
    """Return the size in bytes of the smallest element of a bucket. Return 1 if this size does not
    divide the bucket's number of bytes."""
    size = min((tensor.element_size() for _, tensor in bucket.tensors), default=1)
    return size if bucket.num_bytes % size == 0 else 1


@dataclass
class Traffic:
    """Counts of what weight syncs sent to workers, for one sync or added up over a step."""

    num_bytes: int = 0
    """Bytes of buckets and deltas, summed over workers."""
    full_bytes: int = 0
    """What `num_bytes` would be if every bucket had been sent whole."""
    num_full: int = 0
    """Number of times that a worker received a whole version, because it held no base for a delta or
    because a whole version was due."""
    num_resent: int = 0
    """Number of times that a whole bucket was sent after a delta, because the worker found the delta
    damaged or the result different from the trainer's bucket."""
    num_changed: int = 0
    """Number of elements whose bits changed since the previous version, out of the `num_compared`
    elements that were compared."""
    num_compared: int = 0

    def add(self, other: Traffic) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step, by key. A share is left out if its denominator is 0."""
        found = {
            "rollout/sync_sent_bytes": float(self.num_bytes),
            "rollout/sync_full_workers": float(self.num_full),
            "rollout/sync_resent_buckets": float(self.num_resent),
        }
        if self.full_bytes:
            found["rollout/sync_sent_share"] = self.num_bytes / self.full_bytes
        if self.num_compared:
            found["rollout/sync_changed_share"] = self.num_changed / self.num_compared
        return found
