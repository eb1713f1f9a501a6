"""The files of a snapshot: shares, which one node has and its neighbour, and small ones for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mrl.errors import InputError
from mrl.system.files import write_whole
from parallel.checkpoint import manifest
from parallel.checkpoint.manifest import FileRecord


def share(rank: int) -> str:
    """Return the file that a rank writes."""
    return f"__{rank}_0.distcp"


def is_share(name: str) -> bool:
    """Whether a file is what one rank has written."""
    return name.endswith(".distcp")


def small_files(folder: Path) -> dict[str, bytes]:
    """Read everything but the shares."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if not is_share(f.name)}


def write_small(folder: Path, contents: dict[str, bytes]) -> None:
    """Write what `small_files` has read."""
    for name, data in contents.items():
        write_whole(folder / name, data)


def listed_files(folder: Path) -> dict[str, FileRecord]:
    """Return the files that the manifest lists."""
    files = manifest.read_manifest(folder)["files"]
    return {name: FileRecord(row["bytes"], row["sha256"]) for name, row in files.items()}


def whole_files(folder: Path, sha256: str, number: int, count: int) -> tuple[list[str], list[str]]:
    """Return the files that the snapshot has, and those that are whole here, of every `count`-th from
    `number` on. Both are empty where its manifest is not here."""
    try:
        if manifest.record(folder / manifest.MANIFEST).sha256 != sha256:
            return [], []
        listed = listed_files(folder)
    except (OSError, manifest.Damaged, InputError):
        return [], []
    whole = []
    for name in sorted(listed)[number::count]:
        try:
            if manifest.record(folder / name) == listed[name]:
                whole.append(name)
        except OSError:
            continue
    return sorted(listed), whole


def shares_read(shards: list[ShardedTensor], saved: Metadata) -> set[str]:
    """Return the files with rectangles that overlap those of `shards`."""
    found = set()
    for shard in shards:
        tensor: Any = saved.state_dict_metadata[shard.key]
        for chunk in tensor.chunks:
            pairs = zip(
                shard.global_offset, shard.local_shape, chunk.offsets, chunk.sizes, strict=True
            )
            if all(at < there + more and there < at + size for at, size, there, more in pairs):
                place: Any = saved.storage_data[MetadataIndex(shard.key, chunk.offsets)]
                found.add(place.relative_path)
    return found
