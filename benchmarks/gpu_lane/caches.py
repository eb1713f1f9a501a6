"""This module keeps what is compiled at run time in one folder that travels from call to call.

Triton, inductor, torch's extensions, SGLang's small kernels (tvm-ffi) and CUDA's own compiler each
have a cache that a variable names. A fresh machine has none of them, and compiling again takes minutes
out of ten. The folder is packed into one archive that is written whole or not at all, and
that a later call unpacks before its first part.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import NamedTuple

from mrl.system.files import replaced

FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "SGLANG_CACHE_DIR": "sglang",
    "CUDA_CACHE_PATH": "cuda",
}
"""The variables, each with its folder inside the one."""
ARCHIVE = "gpu_caches.tar.gz"
LIMIT_BYTES = 16 << 20
"""The archive stays below this: what brings files back may take no larger one."""
MARGIN_BYTES = 64 << 10
"""Kept free for headers and the end of the archive."""
NOTHING = (0, 0, 0)
"""The signature of a folder without files."""
PASSING = ("tmp", ".lock")
"""A name that starts or ends so is of a process that was writing; others go into place whole."""


class Packed(NamedTuple):
    """What an archive holds."""

    num_bytes: int
    """The size of the archive."""
    left_out: list[str]
    """Entries for which no room was left, the largest ones."""


def set_variables(environment: MutableMapping[str, str], folder: Path) -> None:
    """Point every cache into `folder`, also one that the environment had elsewhere."""
    for name, inner in FOLDERS.items():
        environment[name] = str(folder / inner)


def signature(folder: Path) -> tuple[int, int, int]:
    """Return the number of files, their bytes and the newest time: it changes with what is cached."""
    stats = [file.stat() for file in folder.rglob("*") if file.is_file()]
    newest = max((stat.st_mtime_ns for stat in stats), default=0)
    return len(stats), sum(stat.st_size for stat in stats), newest


def pack(folder: Path, archive: Path) -> Packed:
    """Write the caches to `archive`, the smallest entries first, as many as fit into LIMIT_BYTES.

    An entry is what a cache holds at its top, for one kernel as a rule. Modification times are kept,
    cut to seconds: ninja, under tvm-ffi, compiles again what looks newer than its record says.
    """
    entries = sorted(_entries(folder), key=lambda entry: (entry[1], entry[0]))
    left_out: list[str] = []
    with (
        replaced(archive) as partial,
        partial.open("wb") as sink,
        gzip.GzipFile(fileobj=sink, mode="wb", compresslevel=6, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for name, num_bytes in entries:
            stream.flush()
            if sink.tell() + num_bytes + MARGIN_BYTES > LIMIT_BYTES:
                left_out.append(name)
                continue
            tar.add(folder / name, arcname=name, filter=_cut)
    return Packed(archive.stat().st_size, left_out)


def restore(archive: Path, folder: Path) -> str:
    """Unpack `archive` into `folder`, whole or not at all; returns a plain line about it.

    A folder that is there stays: the machine is still warm. A damaged archive is a warning.
    """
    if folder.exists():
        return f"caches: those in {folder.name} are used, of an earlier call on this machine"
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        with gzip.open(archive) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                tar.extractall(partial, filter="data")
            while stream.read(1 << 20):  # to the end, where the checksum is
                pass
        num_files, num_bytes, _ = signature(partial)
        os.replace(partial, folder)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        shutil.rmtree(partial, ignore_errors=True)
        return f"warning: {archive} is no archive of caches ({error}); everything is compiled again"
    return f"caches: {num_files} files, {num_bytes / 2**20:.1f} MiB, from {archive}"


class Caches:
    """The caches of one call: unpacked before the first part, packed after each that added to them."""

    def __init__(self, folder: Path, archive: Path | None, out: Path | None) -> None:
        """`archive` is of an earlier call. `out` is where the new one goes; None writes none.

        The variables of this process are changed.
        """
        self.folder, self.out = folder, out
        if archive is not None:
            print(restore(archive, folder), flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        set_variables(os.environ, folder)
        self.packed = NOTHING

    def pack(self) -> None:
        """Write the archive where anything is new since the last one of this call; one that cannot be
        written is a warning."""
        now = signature(self.folder)
        if self.out is None or now == self.packed:
            return
        try:
            done = pack(self.folder, self.out / ARCHIVE)
        except OSError as error:
            print(f"warning: the caches were not packed: {error}", flush=True)
            return
        self.packed = now
        if done.left_out:
            names = ", ".join(done.left_out)
            print(f"warning: {ARCHIVE} has no room for {names}", flush=True)


def _entries(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the entries that are whole: their names in `folder` and what tar takes for them, bytes."""
    for inner in FOLDERS.values():
        for entry in (folder / inner).glob("*"):
            if not _is_passing(entry.name):
                files = [entry] if entry.is_file() else list(entry.rglob("*"))
                sizes = [file.stat().st_size for file in files if file.is_file()]
                yield f"{inner}/{entry.name}", sum(sizes) + 1536 * (len(files) + 1)


def _is_passing(name: str) -> bool:
    begin, end = PASSING
    return name.startswith(begin) or name.endswith(end)


def _cut(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what a process was writing, and the names of users."""
    if _is_passing(info.name.rsplit("/", 1)[-1]):
        return None
    info.mtime = int(info.mtime)
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
