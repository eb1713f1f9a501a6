"""Rectangles into files, at once or in a background process, in torch's and Megatron's own format.

The files and `.metadata` are torch's (torch.distributed.checkpoint), the background process is
Megatron's (AsyncRequest, AsyncCallsQueue), Megatron's `dist_checkpointing.load` reads the result.
Megatron's own writer is not used: it hands its results over through a manager process that outlives a
killed trainer.

Every rank decides for itself what it writes, as its names and rectangles are the whole model's already;
it asks no other rank before the writing. Each then reports what it wrote to rank 0, which makes
`.metadata` of the reports and checks that they fit together, in the background if the save is.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from mrl.errors import RunFailed
from mrl.system.disk import describe
from mrl.system.files import naming, write_whole
from mrl.system.heartbeat import register_writer
from mrl.system.processes import die_with_parent
from parallel.checkpoint.agreement import failed
from parallel.checkpoint.manifest import FileRecord, record

POLL_S = 0.05
REFUSAL_BYTES = 16384
Report = dict[str, Any]
"""What a rank has written: `items` and `files`, or `error`. It is a file, by which rank 0 knows without
a collective; where even that cannot be written, a few bytes that the rank shares with its writer."""


class ShardWriter:
    """A `ShardWriter` makes one save: assign and copy, write (maybe elsewhere), collect, finish.

    `count_bytes`, `request` and `collect` are collectives.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder = folder
        self.rank = rank
        self.world = world
        # No copying ahead: that would use a CUDA stream, which a forked process cannot.
        self._writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
        self._reports: list[Report] | None = None
        self._refusal = mmap.mmap(-1, REFUSAL_BYTES)

    def count_bytes(self, shards: list[ShardedTensor]) -> int:
        """Return the bytes of the tensors that all ranks write together."""
        own = sum(shard.data.nbytes for shard in _written(shards) if shard.data is not None)
        counts: list[int] = [0] * self.world
        dist.all_gather_object(counts, own)
        return sum(counts)

    def request(self, shards: list[ShardedTensor], *, copy: bool) -> AsyncRequest:
        """Decide what this rank writes, and return the writing as a request to run or to start.

        `copy`: to memory that later training steps do not touch.
        """
        written = _written(shards)
        if copy:
            written = [replace(s, data=s.data.to("cpu", copy=True)) for s in written]  # pyright: ignore[reportOptionalMemberAccess]
        by_key: dict[str, list[Any]] = defaultdict(list)
        for shard in written:
            by_key[shard.key].append(CheckpointableShardedTensor.from_sh_ten(shard))
        state = {key: LocalShardsContainer(group) for key, group in by_key.items()}
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, is_coordinator=self.rank == 0)
        self._writer.set_up_storage_writer(self.rank == 0)
        local = planner.create_local_plan()
        share = planner.finish_plan(replace(local, storage_data=_StoragePrefix(f"__{self.rank}_")))
        report = self._report_file(self.rank)
        arguments = (self._writer, planner, share, report, os.getpid(), self._refusal)
        return AsyncRequest(_write, arguments, [])

    def collect(self) -> None:
        """After the writing: raise RunFailed on every rank when one has not written its share. The
        reports come to rank 0 alone."""
        ours = self._read_report(self.rank)
        ours = ours or {"error": "the process that writes ended without a report"}
        errors: list[Any] = [None] * self.world
        dist.all_gather_object(errors, {k: v for k, v in ours.items() if k == "error"})
        self._accept(errors)
        reports: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(ours, reports)
        self._accept(reports or [ours])

    def wait(self, timeout_s: float) -> None:
        """`collect` for when ranks may be gone: rank 0 reads the reports of all, the others their own.

        Raises RunFailed when a rank has not written its share, or not within `timeout_s`.
        """
        if self._reports is not None:
            return
        ranks = range(self.world) if self.rank == 0 else (self.rank,)
        deadline = time.monotonic() + timeout_s
        while missing := self._without_report(ranks):
            if not self.folder.exists():  # rank 0 has given it its name
                return
            if time.monotonic() > deadline:
                raise RunFailed(f"rank {missing[0]} has not written its share in {timeout_s:g} s")
            time.sleep(POLL_S)
        self._accept([self._read_report(rank) or {} for rank in ranks])

    def all_have_reported(self) -> bool:
        """Say, on rank 0, whether `wait` would return, or raise, at once."""
        return not self._without_report(range(self.world))

    def _without_report(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self._read_report(rank) is None]

    def finish(self) -> dict[str, FileRecord]:
        """Write `.metadata` on rank 0, after `collect` or `wait`; return every file with size
        and digest.

        Raises ValueError unless each element of each tensor was written exactly once.
        """
        assert self._reports is not None
        metadata = joined_metadata([report["items"] for report in self._reports])
        results = [[_result(item) for item in report["items"]] for report in self._reports]
        self._writer.finish(metadata, results)
        for rank in range(self.world):
            self._report_file(rank).unlink(missing_ok=True)
        return {n: FileRecord(*r) for report in self._reports for n, r in report["files"].items()}

    def _accept(self, reports: list[Report]) -> None:
        for rank, report in enumerate(reports):
            if "error" in report:
                raise failed(self.folder, f"rank {rank}: {report['error']}")
        self._reports = reports

    def _report_file(self, rank: int) -> Path:
        return self.folder / f"written_{rank:05d}.json"

    def _read_report(self, rank: int) -> Report | None:
        told = self._refusal[:].rstrip(b"\0") if rank == self.rank else b""
        if told:
            return {"error": told.decode(errors="replace")}
        try:
            return json.loads(self._report_file(rank).read_text())
        except (OSError, ValueError):
            return None


def check_coverage(metadata: Metadata) -> None:
    """torch has checked that no rectangles overlap; here, that their volumes are those of the tensors.

    Raises ValueError.
    """
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        volume = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if volume != math.prod(tensor.size):
            raise ValueError(f"{volume} of {math.prod(tensor.size)} elements of {key} are written")


def _written(shards: list[ShardedTensor]) -> list[ShardedTensor]:
    """Return the shards that this rank writes, of which others may hold copies."""
    return [shard for shard in shards if is_main_replica(shard.replica_id)]


def _write(
    writer: FileSystemWriter,
    planner: DefaultSavePlanner,
    share: SavePlan,
    report: Path,
    parent: int,
    refusal: mmap.mmap,
) -> None:
    """Write this rank's file and digest it. What happened goes into `report`, never up the stack.

    What cannot be written leaves its bytes to others: the share is removed, and why goes into `refusal`
    as well, which takes no room on the disk.
    """
    try:
        if os.getpid() != parent:
            _settle_in_child(parent)
        with naming(report.parent / f"{share.storage_data.prefix}0.distcp"):
            results = writer.write_data(share, planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        files = {name: tuple(record(report.parent / name)) for name in names}
        by_index = {result.index: result for result in results}
        items = [_item(by_index[item.index], item) for item in share.items]
        # Whole: another process may be waiting for it.
        write_whole(report, json.dumps({"items": items, "files": files}))
    except Exception as error:
        text = describe(error, report.parent)
        refusal[:] = text.encode()[:REFUSAL_BYTES].ljust(REFUSAL_BYTES, b"\0")
        with suppress(OSError):  # on a read-only file system too
            for file in report.parent.glob(f"{share.storage_data.prefix}*"):
                file.unlink()
            write_whole(report, json.dumps({"error": text}))


def _settle_in_child(parent: int) -> None:
    """Exit when the trainer dies: the next one writes to the same place."""
    torch.set_num_threads(1)  # the parent's OpenMP threads did not come along
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; this is to be finished
    register_writer()  # the trainer may wait for it
    die_with_parent(parent)


Item = list[Any]
"""A rectangle that was written: name, offset, bytes, file, place in it (offset and length), its shape,
the tensor's shape, the dtype."""


def _item(result: WriteResult, item: WriteItem) -> Item:
    place: _StorageInfo = result.storage_data
    tensor = item.tensor_data
    assert tensor is not None
    return [
        result.index.fqn, list(tensor.chunk.offsets), result.size_in_bytes,
        place.relative_path, place.offset, place.length,
        list(tensor.chunk.sizes), list(tensor.size), str(tensor.properties.dtype),
    ]  # fmt: skip


def _result(item: Item) -> WriteResult:
    name, offset, size, file, start, length, *_ = item
    return WriteResult(MetadataIndex(name, offset), size, _StorageInfo(file, start, length))


def joined_metadata(items_by_rank: Sequence[Sequence[Item]]) -> Metadata:
    """Return what `.metadata` says of the tensors, as torch's planner would make it of all shares.

    Raises ValueError where the shares do not fit together: shapes or dtypes differ, rectangles overlap,
    reach beyond their tensor, or leave some of it out.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    for name, offset, _, _, _, _, sizes, whole, dtype in chain.from_iterable(items_by_rank):
        size = torch.Size(whole)
        properties = TensorProperties(getattr(torch, dtype.removeprefix("torch.")))
        tensor = tensors.setdefault(name, TensorStorageMetadata(properties, size, []))
        if tensor.size != size or tensor.properties.dtype != properties.dtype:
            raise ValueError(
                f"the ranks' shares do not fit together: {name} is {tensor.properties.dtype} "
                f"{list(tensor.size)} on one rank and {dtype} {whole} on another"
            )
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
    metadata = Metadata({**tensors})
    if errors := _validate_global_plan([], metadata):
        raise ValueError(f"the ranks' shares do not fit together: {errors[0]}")
    check_coverage(metadata)
    return metadata
