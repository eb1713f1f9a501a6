"""Write a Hugging Face folder: safetensors files of bounded size, only one of which is in memory at
a time, and a copy of another folder's tokenizer."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mrl.errors import DiskFailed, InputError

INDEX = "model.safetensors.index.json"
COPIED = (
    "tokenizer*", "chat_template*", "vocab.*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "generation_config.json", "preprocessor_config.json", "LICENSE*",
)  # fmt: skip
"""Patterns of the files that are copied from one model folder to another. Code files are not copied."""


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> dict[str, str]:
    """Write `model-00001-of-00003.safetensors` and so on, and the index. Return a dict from
    tensor name to file name.

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
    """Return the temporary name of output file `number`. The final name contains the number of
    files, which is known only at the end."""
    return f"model-{number:05d}.safetensors.partial"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Context manager. Yields a hidden folder to write into, and renames it to `target` when the `with`
    statement ends.

    Raises InputError if `target` is not empty or cannot be made, or if another process is writing it,
    and DiskFailed if writing fails. If writing fails, the hidden folder is removed.
    """
    target = Path(os.path.abspath(target))  # a folder cannot be renamed to `.` or `..`
    partial = target.parent / f".{target.name}.partial"
    try:
        if os.path.lexists(target):
            if target.is_symlink() or not target.is_dir() or any(target.iterdir()):
                raise InputError(f"{target} is not an empty folder; give a new one")
            if target == Path.cwd():
                raise InputError(f"{target} is the folder that you are in; give a new one")
            target.rmdir()  # a mount point cannot be replaced: find that out before hours of writing
        partial.mkdir(parents=True, exist_ok=True)
        lock = _lock_folder(partial)
    except BlockingIOError:
        raise InputError(f"another process is writing {target}; give another folder") from None
    except OSError as error:
        raise InputError(
            f"{target} cannot be made: {error.strerror}; give another folder"
        ) from None
    is_done = False
    try:
        if os.path.lexists(target):  # of a process that has ended since
            raise InputError(f"{target} is not an empty folder; give a new one")
        _remove_contents(partial)  # of a process that was killed
        yield partial
        partial.rename(target)
        is_done = True
    except (OSError, SafetensorError) as error:
        raise DiskFailed(
            f"{target} could not be written: {error}; no partial output remains"
        ) from None
    finally:
        if not is_done:  # afterwards, a folder of this name is another process's
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _lock_folder(folder: Path) -> int:
    """Open and lock a folder, and return the file descriptor; closing it releases the lock.

    Raises BlockingIOError if another process holds the lock or has just renamed the folder. Raises
    another OSError for a symbolic link, because files would be deleted in the folder to which it
    points. On a file system that has no locks, such as some network file systems, the folder is not
    locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        return descriptor
    if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
        os.close(descriptor)
        raise BlockingIOError
    return descriptor


def _remove_contents(folder: Path) -> None:
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def copy_files(source: Path, target: Path) -> None:
    """Copy the tokenizer and the other files of COPIED from one model folder to another."""
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
