"""Each rank that an engine spans gives the engine its own copy of a bucket.

Rank r of the trainer's engine group and rank r of the engine share a device (on CPUs a node). An
engine's rank can only read memory of its own device: a handle to another GPU's memory is not mapped
there, and a memfd of another node cannot be opened. So every rank makes a handle to its own copy of the
bucket, and the leader, rank 0 of the group, gets all of them.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from mrl.system.heartbeat import beat
from mrl.system.mapped_file import map_file, map_registered_file
from mrl.types import Handle, WeightBucket

DEVICE_FIELD = 6
"""The index of the device in torch's reduced CUDA tensor (torch/multiprocessing/reductions.py)."""
Exchange = Callable[[Any], list[Any]]
"""What this rank has to say -> what every rank of the group says, in rank order."""


def handle_of(flat: Tensor | None, path: str | None) -> Handle:
    """How another process of this machine opens `flat` u8[num_bytes]. To be opened once, on GPUs.

    On CPUs `path` is a file that starts with it. Returns when the device has written it. Raises
    ValueError where it does not lie in memory that can be shared.
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
    # A handle wraps the pointer of a storage once more, with a CUDA event. On the trainer's buffer
    # they would pile up until it is freed; on a storage of their own they go as soon as the engine
    # lets go (torch/csrc/StorageSharing.cpp, THPStorage_shareCuda; CudaIPCTypes.cpp).
    rebuild, fields = reductions.reduce_tensor(torch.from_dlpack(flat))
    # The device by UUID: its number differs where CUDA_VISIBLE_DEVICES does. SGLang understands both.
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    return rebuild, (*fields[:DEVICE_FIELD], uuid, *fields[DEVICE_FIELD + 1 :])


def file_handle(path: str, num_bytes: int) -> Handle:
    """Return a handle to the first `num_bytes` of a file, which the other process maps."""
    return map_file, (path, num_bytes)


def registered_file_handle(path: str, num_bytes: int) -> Handle:
    """Return such a handle to a file that is used in every sync: the other process keeps it mapped, and
    registers the memory with CUDA."""
    return map_registered_file, (path, num_bytes)


class EngineGroup:
    """The trainer's ranks that one engine spans, joined by gloo: NCCL must stay idle while engines use
    the devices, and a few hundred bytes travel."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """None: an engine of one rank, which needs nobody else."""
        self._group = group

    @classmethod
    def create(cls, rank: int, world: int, size: int, *, timeout_s: float = 1800.0) -> EngineGroup:
        """Make the group of `rank` among groups of `size` neighbouring ranks. A collective of
        all ranks.

        `timeout_s`: how long an exchange waits. The ranks of an engine over several nodes wait in one
        for their leader while it generates.
        """
        if size == 1:
            return cls(None)
        timeout = datetime.timedelta(seconds=timeout_s)
        own: Any = None  # torch names another type for those that are not in a group
        for start in range(0, world, size):  # every rank takes part in making every group
            ranks = list(range(start, start + size))
            group = dist.new_group(ranks, timeout=timeout, backend="gloo")
            own = group if rank in ranks else own
        return cls(own)

    def exchange(self, own: Any) -> list[Any]:
        """What each rank says, in rank order, on every rank."""
        if self._group is None:
            return [own]
        said: list[Any] = [None] * self._group.size()
        dist.all_gather_object(said, own, self._group)
        return said


class GatheredBuckets:
    """The buckets of an export on one rank of an engine's group, with the handles of all its ranks.

    The leader iterates as far as it likes, then every rank calls `finish()`. The ranks meet before each
    bucket is built, so nobody builds one that the leader has not asked for; a leader that asks is
    through with the bucket before the last, so an export may use two buffers in turn. A rank that fails
    says so to all of them, and each one raises.
    """

    def __init__(
        self, buckets: Iterator[WeightBucket], exchange: Exchange, *, has_handles: bool = True
    ) -> None:
        """`buckets` may be a collective of more ranks than these: it is always drained.

        Without `has_handles` the leader's own bucket is enough, and the others run freely.
        """
        self._buckets = buckets
        self._exchange = exchange
        self._is_wanted = True
        """The leader says with it that someone opens the handles."""
        self._has_handles = has_handles
        """The same on every rank: the rest of the buckets go on with handles."""
        self._is_over = False

    def __iter__(self) -> Iterator[WeightBucket]:
        return self

    def __next__(self) -> WeightBucket:
        """Raises RuntimeError, on every rank, where one of them cannot build or share its bucket."""
        if self._is_over:
            raise StopIteration
        if self._has_handles:
            self._has_handles = self._meet()
        beat()
        bucket, failure = None, None
        try:
            bucket = next(self._buckets)
        except StopIteration:
            self._is_over = True
            raise
        except Exception as error:  # it must reach the other ranks, whatever it is
            failure = error
        if not self._has_handles:
            if failure is not None:
                raise failure
            assert bucket is not None
            return bucket
        return self._with_handles(bucket, failure)

    def finish(self) -> None:
        """Follow the export to its end, after the leader is through with what it took.

        When it returns, no process but this one has a bucket open. Raises as `__next__` does.
        """
        self._is_wanted = False
        try:
            for _ in self:
                pass
        finally:
            for _ in self._buckets:  # of ranks that have failed: the others still need their part
                pass
            self._meet()

    def _meet(self) -> bool:
        """Whether the leader goes on. Frees the handles that the engine has let go of until now."""
        goes_on: bool = self._exchange(self._is_wanted)[0]
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()
        return goes_on

    def _with_handles(self, bucket: WeightBucket | None, failure: Exception | None) -> WeightBucket:
        handle = None
        if bucket is not None:
            try:
                handle = handle_of(bucket.flat, bucket.shared_path)
            except Exception as error:
                failure = error
        said = self._exchange((handle, failure and f"{type(failure).__name__}: {failure}"))
        if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(said) if text]:
            self._has_handles = False
            raise RuntimeError(
                "update_weights: these of the ranks that the engine spans could not share their copy "
                f"of the weights: {'; '.join(failed)}"
            ) from failure
        assert bucket is not None
        return dataclasses.replace(bucket, handles=tuple(handle for handle, _ in said))
