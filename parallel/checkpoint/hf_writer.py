"""Write tensors into safetensors files of bounded size, with one file in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> dict[str, str]:
    """Write `model-00001-of-00003.safetensors` and so on, and the index. Return a dict from the
    names of the tensors to the names of their files.

    A file is closed before it would exceed `max_bytes`; a larger tensor gets a file of its own. The
    tensors come from a checkpoint (`parallel.checkpoint.hf_export`) or from the buckets of a live
    `Policy.export`. Raises ValueError if a name comes twice, or if there are no tensors.
    """
    readable = folder.stat().st_mode & 0o666
    groups: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    seen: set[str] = set()
    size = total = 0

    def flush() -> None:
        groups.append(list(pending))
        file = folder / _temporary(len(groups))
        save_file(pending, file, metadata={"format": "pt"})
        file.chmod(readable)  # safetensors lets only the owner read it
        pending.clear()

    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"{name} comes twice")
        seen.add(name)
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and size + num_bytes > max_bytes:
            flush()
            size = 0
        pending[name] = tensor.detach().cpu().contiguous().clone()  # no view of a larger storage
        size, total = size + num_bytes, total + num_bytes
    if pending:
        flush()
    if not groups:
        raise ValueError("there are no tensors to write")
    where = {}
    for number, names in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        (folder / _temporary(number)).rename(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return where


def _temporary(number: int) -> str:
    """Return the name that file number `number` has until the number of files is known."""
    return f"model-{number:05d}.safetensors.partial"
