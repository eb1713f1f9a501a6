"""Write rectangles of tensors into files, in this process or in a background process.

The files and `.metadata` have torch's format (torch.distributed.checkpoint). The background process
is Megatron's (AsyncRequest, AsyncCallsQueue). Megatron's `dist_checkpointing.load` reads the
result. Megatron's own writer is not used, because it passes its results through a manager process
that outlives a killed trainer.

Every rank decides by itself what it writes, without asking other ranks. This is possible because names
and rectangles refer to the whole model. Each rank then reports to rank 0 what it has written. Rank 0
makes `.metadata` from the reports, and checks that they fit together. In an asynchronous save, this is
done in the background as well.
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
from mrl.system.torch_names import TORCH
from parallel.checkpoint.agreement import failed
from parallel.checkpoint.manifest import FileRecord, record
from parallel.mesh import gather_objects

StorageInfo = TORCH.take("_StorageInfo")
POLL_S = 0.05
REFUSAL_BYTES = 16384
Report = dict[str, Any]
"""A rank's report of what it has written: the keys `items` and `files`, or only `error`. The report
is a file, so that rank 0 can read it without a collective. If even this file cannot be written, the
error is in memory that the rank shares with its writing process."""


class ShardWriter:
    """Writes one save.

    Call `request`, run the request (maybe in another process), call `collect` or `wait`, and then
    `finish` on rank 0. `count_bytes` and `collect` are collectives.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder = folder
        self.rank = rank
        self.world = world
        # No copying ahead, because a forked process cannot use a CUDA stream.
        self._writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
        self._reports: list[Report] | None = None
        self._refusal = mmap.mmap(-1, REFUSAL_BYTES)

    def count_bytes(self, shards: list[ShardedTensor]) -> int:
        """Return the number of bytes that all ranks together write."""
        own = sum(shard.data.nbytes for shard in _written(shards) if shard.data is not None)
        return sum(gather_objects(own))

    def request(self, shards: list[ShardedTensor], *, copy: bool) -> AsyncRequest:
        """Decide what this rank writes; return a request that does the writing when it is run.

        `copy`: whether to copy the data first, to host memory that later training steps do not
        change.
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
        prefix = TORCH.take("_StoragePrefix")(f"__{self.rank}_")
        share = planner.finish_plan(replace(local, storage_data=prefix))
        report = self._report_file(self.rank)
        arguments = (self._writer, planner, share, report, os.getpid(), self._refusal)
        return AsyncRequest(_write, arguments, [])

    def collect(self) -> None:
        """Send the reports of all ranks to rank 0, after the writing.

        Raises RunFailed on every rank if one rank has not written its part.
        """
        ours = self._read_report(self.rank)
        ours = ours or {"error": "the process that writes ended without a report"}
        self._accept(gather_objects({k: v for k, v in ours.items() if k == "error"}))
        reports: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(ours, reports)
        self._accept(reports or [ours])

    def wait(self, timeout_s: float) -> None:
        """Read the reports from their files, without a collective, because ranks may have died.

        Rank 0 waits for the reports of all ranks, and every other rank only for its own report.
        Raises RunFailed if one of these ranks reports an error, or does not report within
        `timeout_s` seconds. Returns early if rank 0 has already completed the checkpoint.
        """
        if self._reports is not None:
            return
        ranks = range(self.world) if self.rank == 0 else (self.rank,)
        deadline = time.monotonic() + timeout_s
        while missing := self._without_report(ranks):
            if not self.folder.exists():  # rank 0 has renamed it already
                return
            if time.monotonic() > deadline:
                raise RunFailed(f"rank {missing[0]} has not written its share in {timeout_s:g} s")
            time.sleep(POLL_S)
        self._accept([self._read_report(rank) or {} for rank in ranks], ranks[0])

    def all_have_reported(self) -> bool:
        """Return, on rank 0, whether all ranks have reported. If so, `wait` does not block."""
        return not self._without_report(range(self.world))

    def _without_report(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self._read_report(rank) is None]

    def finish(self) -> dict[str, FileRecord]:
        """Write `.metadata` on rank 0, after `collect` or `wait`; return the size and digest of
        every rank's files.

        Raises ValueError unless each element of each tensor was written exactly once.
        """
        assert self._reports is not None
        metadata = joined_metadata([report["items"] for report in self._reports])
        results = [[_result(item) for item in report["items"]] for report in self._reports]
        self._writer.finish(metadata, results)
        for rank in range(self.world):
            self._report_file(rank).unlink(missing_ok=True)
        return {n: FileRecord(*r) for report in self._reports for n, r in report["files"].items()}

    def _accept(self, reports: list[Report], first: int = 0) -> None:
        """Keep `reports`, of the ranks from `first` on. Raises RunFailed for one with an error."""
        for rank, report in enumerate(reports, first):
            if "error" in report:
                raise failed(self.folder, f"rank {rank}: {report['error']}")
        self._reports = reports

    def _report_file(self, rank: int) -> Path:
        return self.folder / f"written_{rank:05d}.json"

    def _read_report(self, rank: int) -> Report | None:
        error = self._refusal[:].rstrip(b"\0") if rank == self.rank else b""
        if error:
            return {"error": error.decode(errors="replace")}
        try:
            return json.loads(self._report_file(rank).read_text())
        except (OSError, ValueError):
            return None


def check_coverage(metadata: Metadata) -> None:
    """Raise ValueError unless the rectangles of each tensor together have as many elements as the
    tensor.

    torch must have checked before that the rectangles do not overlap.
    """
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        volume = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if volume != math.prod(tensor.size):
            raise ValueError(f"{volume} of {math.prod(tensor.size)} elements of {key} are written")


def _written(shards: list[ShardedTensor]) -> list[ShardedTensor]:
    """Return the shards that this rank writes. If several ranks hold copies of a shard, only the
    first copy is written."""
    return [shard for shard in shards if is_main_replica(shard.replica_id)]


def _write(
    writer: FileSystemWriter,
    planner: DefaultSavePlanner,
    share: SavePlan,
    report: Path,
    parent: int,
    refusal: mmap.mmap,
) -> None:
    """Write this rank's file, compute its digest, and write the report. An error is written to the
    report, and never raised.

    After an error the written file is removed, so that other files can use its space. The error is
    also put into `refusal`, memory that the rank shares with its writing process, in case the disk
    is full. `parent` is the process id of the trainer.
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
        # This is atomic, because another process may be waiting for the file.
        write_whole(report, json.dumps({"items": items, "files": files}))
    except Exception as error:
        text = describe(error, report.parent)
        refusal[:] = text.encode()[:REFUSAL_BYTES].ljust(REFUSAL_BYTES, b"\0")
        with suppress(OSError):  # on a read-only file system too
            for file in report.parent.glob(f"{share.storage_data.prefix}*"):
                file.unlink()
            write_whole(report, json.dumps({"error": text}))


def _settle_in_child(parent: int) -> None:
    """Prepare the writing process. From then on it ends when the trainer (process id `parent`) dies,
    because the next trainer writes to the same files."""
    torch.set_num_threads(1)  # a fork does not have the parent's OpenMP threads
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all, but the writing should finish
    register_writer()  # the trainer may wait for this process
    die_with_parent(parent)


Item = list[Any]
"""A written rectangle of a tensor: name of the tensor, offset in the tensor, number of bytes, file,
offset and length in the file, shape of the rectangle, shape of the tensor, dtype."""


def _item(result: WriteResult, item: WriteItem) -> Item:
    place: Any = result.storage_data  # a StorageInfo
    tensor = item.tensor_data
    assert tensor is not None
    return [
        result.index.fqn, list(tensor.chunk.offsets), result.size_in_bytes,
        place.relative_path, place.offset, place.length,
        list(tensor.chunk.sizes), list(tensor.size), str(tensor.properties.dtype),
    ]  # fmt: skip


def _result(item: Item) -> WriteResult:
    name, offset, size, file, start, length, *_ = item
    return WriteResult(MetadataIndex(name, offset), size, StorageInfo(file, start, length))


def joined_metadata(items_by_rank: Sequence[Sequence[Item]]) -> Metadata:
    """Return `.metadata` with the entries that torch's planner would make from the items of all ranks.

    Raises ValueError if the items do not fit together: ranks have different shapes or dtypes for a
    tensor, or the rectangles of a tensor overlap, reach beyond the tensor, or leave a part of it
    out.
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
    errors = TORCH.take("_validate_global_plan")([], metadata)
    if isinstance(errors, bool):  # torch 2.11 returns whether all is well, and logs what is not
        errors = [] if errors else ["rectangles overlap or reach beyond a tensor (torch's log)"]
    if errors:
        raise ValueError(f"the ranks' shares do not fit together: {errors[0]}")
    check_coverage(metadata)
    return metadata
