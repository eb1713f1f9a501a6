"""A save that is being written. The checkpoint gets its name as soon as every rank has written its
part."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

from mrl.system.disk import describe, require_room
from mrl.system.files import sync, write_whole
from mrl.system.processes import deferring_interrupts
from parallel.checkpoint import manifest
from parallel.checkpoint.shard_writer import POLL_S, ShardWriter

CONFIG_FILE = "metadata.json"
COMMON_FILE = "common.pt"


class Record(Protocol):
    """The run's own files. A checkpoint keeps a copy of some of them."""

    def kept(self, step: int) -> Mapping[str, bytes]:
        """Return the files that are copied into the checkpoint of `step`, as a dict from file name
        to contents."""
        ...

    def settle(self, step: int) -> None:
        """Wait until the files of the steps before `step` are on the disk. A background thread may
        call this."""
        ...


@dataclass
class PendingSave:
    """A save in flight. A thread of rank 0 may complete it in the background.

    If the thread fails, it stores the reason. The next `Checkpoints.poll` or `finish` then raises
    RunFailed with this reason on all ranks.
    """

    root: Path
    step: int
    keep: int
    content: dict[str, Any]
    """The fields of the manifest."""
    writer: ShardWriter
    record: Record | None = None
    """The run's files; None on ranks other than 0, and for a checkpoint that belongs to no run."""
    is_published: bool = False
    """Whether the checkpoint is complete and has its name."""
    failure: str | None = None
    """The reason why the thread could not publish the checkpoint."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _watcher: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._kept = {} if self.record is None else self.record.kept(self.step)

    def schedule(self, queue: AsyncCallsQueue, request: AsyncRequest) -> None:
        """Start the process that writes this rank's part, and on rank 0 the thread that publishes."""
        with deferring_interrupts():
            queue.schedule_async_request(request)
        if dist.get_rank() == 0:
            self.watch()

    def watch(self) -> None:
        """Start a thread on rank 0 that publishes the checkpoint as soon as all ranks have written.

        The checkpoint then survives even if the trainer is killed in the middle of a long step.
        """
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def stop_watching(self) -> None:
        """Stop the thread. `is_published` and `failure` do not change afterwards.

        If the thread has neither published the checkpoint nor failed, the ranks' reports are still
        in the folder.
        """
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def publish(self) -> None:
        """Complete the checkpoint and give it its name. Call this on rank 0, after the writer has
        received the reports of all ranks."""
        partial, files = self.writer.folder, self.writer.finish()
        save_config(CheckpointingConfig("torch_dist"), str(partial))
        for name, data in self._kept.items():
            write_whole(partial / name, data)
        for name in (COMMON_FILE, CONFIG_FILE, ".metadata", *self._kept):
            sync(partial / name)
            files[name] = manifest.record(partial / name)
        if self.record is not None:
            self.record.settle(self.step)
        manifest.write_manifest(partial, self.content, files)
        manifest.publish(self.root, self.step, self.keep)
        self.is_published = True

    def _watch(self) -> None:
        while not self.writer.all_have_reported():
            if self._stop.wait(POLL_S):
                return
        try:
            self.writer.wait(0.0)
            self.publish()
        except Exception as error:  # no one would see an error of this thread
            self.failure = describe(error, self.writer.folder)


def start_folder(partial: Path, common: dict[str, Any], num_bytes: int) -> None:
    """Make the folder of a save, and write `common`, the state that belongs to no single rank, into
    its file `common.pt`.

    Remains of interrupted saves are removed first. Raises DiskFailed if fewer than `num_bytes`
    bytes are free.
    """
    manifest.sweep(partial.parent)
    require_room(partial, num_bytes)
    partial.parent.mkdir(exist_ok=True)  # but not the run folder, which may have been moved
    partial.mkdir()
    stream = io.BytesIO()  # torch.save does not report a full disk
    torch.save(common, stream)
    write_whole(partial / COMMON_FILE, stream.getvalue())
