"""The files of a snapshot: shares and small files.

A share is the large file that one rank writes. It is on the rank's node and on the next node. The
small files are on all nodes.
"""

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
    """Return the name of the share of a rank, the large file that the rank writes into a snapshot."""
    return f"__{rank}_0.distcp"


def is_share(name: str) -> bool:
    """Return whether `name` is the file name of a share, the large file that one rank writes."""
    return name.endswith(".distcp")


def small_files(folder: Path) -> dict[str, bytes]:
    """Return, by file name, the contents of the manifest, of its digest and of all files that it lists
    except the ranks' large files. Other files, such as partial output of a killed process, are left
    out."""
    listed = [name for name in listed_files(folder) if not is_share(name)]
    names = [*listed, manifest.MANIFEST, manifest.DIGEST]
    return {name: (folder / name).read_bytes() for name in names}


def write_small(folder: Path, contents: dict[str, bytes]) -> None:
    """Write the files whose contents `small_files` returned."""
    for name, data in contents.items():
        write_whole(folder / name, data)


def listed_files(folder: Path) -> dict[str, FileRecord]:
    """Return a dict from file name to the size and digest that the manifest lists for the file."""
    files = manifest.read_manifest(folder)["files"]
    return {name: FileRecord(row["bytes"], row["sha256"]) for name, row in files.items()}


def whole_files(folder: Path, sha256: str, number: int, count: int) -> tuple[list[str], list[str]]:
    """Return two lists of file names: all files of the snapshot, and those that were checked and are
    undamaged in `folder`.

    Only every `count`-th file, starting with file `number`, is checked. Both lists are empty if the
    folder does not have the snapshot's manifest, whose digest is `sha256`.
    """
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
    """Return the names of the ranks' large files from which the tensors `shards` are read."""
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
