"""A save that is being written: it gets its name as soon as every rank has written its share."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from mrl.system.disk import describe, require_room
from mrl.system.files import sync, write_whole
from parallel.checkpoint import manifest
from parallel.checkpoint.shard_writer import POLL_S, ShardWriter

CONFIG_FILE = "metadata.json"
COMMON_FILE = "common.pt"


class Record(Protocol):
    """A `Record` is the run's folder, of which a checkpoint keeps what it cannot do without."""

    def kept(self, step: int) -> Mapping[str, bytes]:
        """Return the files that the checkpoint of `step` gets a copy of, by name."""
        ...

    def settle(self, step: int) -> None:
        """Wait until the files of the steps before `step` are on the disk; in a thread of its own."""
        ...


@dataclass
class PendingSave:
    """A thread of rank 0 gives the save its name, or keeps what went wrong for the next collective."""

    root: Path
    step: int
    keep: int
    content: dict[str, Any]
    """Fields of the manifest."""
    writer: ShardWriter
    record: Record | None = None
    """The run's folder, on rank 0; a checkpoint of no run has none."""
    is_published: bool = False
    failure: str | None = None
    """Why the thread could not give it its name."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _watcher: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._kept = {} if self.record is None else self.record.kept(self.step)

    def watch(self) -> None:
        """Publish on rank 0 in the background, so that what was written survives a trainer that is
        killed in the middle of a long step."""
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def stop_watching(self) -> None:
        """After this `is_published` and `failure` are final, or neither is set and the reports are
        where they were."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def publish(self) -> None:
        """Publish on rank 0, when the writer has the reports of all ranks."""
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
        except Exception as error:  # nobody would see it here
            self.failure = describe(error, self.writer.folder)


def start_folder(partial: Path, common: dict[str, Any], num_bytes: int) -> None:
    """Make the folder of a save of `num_bytes`, with what is no rank's own."""
    manifest.sweep(partial.parent)
    require_room(partial, num_bytes)
    partial.parent.mkdir(exist_ok=True)  # but not the run folder, which may have been moved
    partial.mkdir()
    stream = io.BytesIO()  # torch.save to a full disk does not say so
    torch.save(common, stream)
    write_whole(partial / COMMON_FILE, stream.getvalue())
