"""Handles with which an engine on the trainer's devices opens the trainer's buckets of weights.

Rank r of the trainer's engine group and rank r of the engine share a device, or on CPUs a node. A
rank of an engine can read only the memory of its own device: a handle to another GPU's memory
cannot be mapped there, and a memfd of another node cannot be opened. Therefore every rank of the
trainer's group makes a handle to its own copy of the bucket (CUDA IPC, or a shared file on CPUs).
The leader, rank 0 of the group, gets the handles of all ranks.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mrl.engines.handles import handle_of
from mrl.system.heartbeat import beat
from mrl.types import WeightBucket

Exchange = Callable[[Any], list[Any]]
"""A collective: takes an object of this rank, and returns the objects of all ranks in rank order."""


class EngineGroup:
    """The trainer's ranks that one engine spans. They exchange a few hundred bytes over gloo, because
    NCCL must stay idle while engines use the devices."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` is None for an engine of one rank."""
        self._group = group

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return 1 if self._group is None else self._group.size()

    @classmethod
    def create(cls, rank: int, world: int, size: int, *, timeout_s: float = 1800.0) -> EngineGroup:
        """Divide the `world` ranks into groups of `size` neighbouring ranks, and return the group of
        `rank`. A collective of all ranks.

        `timeout_s` limits the wait in an exchange. If an engine spans nodes, the other ranks of its
        group wait in an exchange while the leader generates.
        """
        if size == 1:
            return cls(None)
        timeout = datetime.timedelta(seconds=timeout_s)
        own: Any = None  # torch's type annotation has another type for ranks outside a group
        for start in range(0, world, size):  # every rank takes part in making every group
            ranks = list(range(start, start + size))
            group = dist.new_group(ranks, timeout=timeout, backend="gloo")
            own = group if rank in ranks else own
        return cls(own)

    def exchange(self, own: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order, on every rank. A collective of the group."""
        if self._group is None:
            return [own]
        gathered: list[Any] = [None] * self._group.size()
        dist.all_gather_object(gathered, own, self._group)
        return gathered


class GatheredBuckets:
    """The buckets of an export on one rank of an engine's group, with the handles of all ranks of the
    group.

    The leader iterates as far as its engine needs; then every rank calls `finish`. The ranks
    synchronise before each bucket is built, so no rank builds a bucket that the leader has not asked
    for. When the leader asks for bucket n + 2, it no longer needs bucket n, so an export may use two
    buffers in turn. If one rank fails, all ranks raise.
    """

    def __init__(
        self, buckets: Iterator[WeightBucket], exchange: Exchange, *, has_handles: bool = True
    ) -> None:
        """`buckets` is always drained, because ranks outside the group may take part in the export.

        Without `has_handles`, the engine reads only the leader's buckets, and the ranks do not
        synchronise before each bucket.
        """
        self._buckets = buckets
        self._exchange = exchange
        self._is_wanted = True
        """Whether this rank still wants buckets with handles. Only the leader's value counts."""
        self._has_handles = has_handles
        """Whether the next buckets get handles. The value is the same on every rank."""
        self._is_over = False

    def __iter__(self) -> Iterator[WeightBucket]:
        return self

    def __next__(self) -> WeightBucket:
        """Return the next bucket. Raises RuntimeError on every rank if a rank cannot build or share its
        bucket."""
        if self._is_over:
            raise StopIteration
        if self._has_handles:
            self._has_handles = self._synchronise()
        beat()
        return self._share_next() if self._has_handles else self._build()

    def _build(self) -> WeightBucket:
        try:
            return next(self._buckets)
        except StopIteration:
            self._is_over = True
            raise

    def finish(self) -> None:
        """Iterate over the rest of the export, so that every rank has exhausted it.

        The leader calls this when its engine has loaded the buckets that the leader took. When this
        returns, no other process has a bucket open. Raises RuntimeError as `__next__` does.
        """
        self._is_wanted = False
        try:
            for _ in self:
                pass
        finally:
            for _ in self._buckets:  # even after a failure other ranks need this one's part
                pass
            self._synchronise()

    def _synchronise(self) -> bool:
        """Return the leader's `_is_wanted`, and free CUDA handles that the engine has released."""
        goes_on: bool = self._exchange(self._is_wanted)[0]
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()
        return goes_on

    def _share_next(self) -> WeightBucket:
        bucket, handle, failure = None, None, None
        try:
            bucket = self._build()
            handle = handle_of(bucket.flat, bucket.shared_path)
        except StopIteration:
            raise
        except Exception as error:  # of any kind: the other ranks must learn of it
            failure = error
        shared = self._exchange((handle, failure and f"{type(failure).__name__}: {failure}"))
        if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(shared) if text]:
            self._has_handles = False
            raise RuntimeError(
                "update_weights: these of the ranks that the engine spans could not share their copy "
                f"of the weights: {'; '.join(failed)}"
            ) from failure
        assert bucket is not None
        return dataclasses.replace(bucket, handles=tuple(handle for handle, _ in shared))
