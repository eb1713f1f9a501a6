"""Send files from rank to rank over gloo. All files are sent at the same time, piece by piece."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from mrl.system.disk import describe
from parallel.checkpoint.agreement import failed, first_reason
from parallel.checkpoint.manifest import FileRecord
from parallel.mesh import Mesh

PIECE_BYTES = 32 << 20


class Move(NamedTuple):
    """A transfer of the file `name` from one rank's folder to another rank's."""

    source: int
    target: int
    name: str


@dataclass
class _File:
    """A file that this rank sends or receives."""

    move: Move
    descriptor: int
    num_bytes: int
    sends: bool


def move_files(mesh: Mesh, moves: list[Move], folder: Path, listed: dict[str, FileRecord]) -> None:
    """Carry out `moves` between the ranks' folders. A collective: every rank passes the same moves.

    A file gets its name when it is complete and has the digest in `listed`. Raises RunFailed or
    DiskFailed on every rank if one rank cannot read or write a file, or receives a damaged one.
    """
    reason: str | None = None
    files: list[_File] = []
    try:
        for move in moves:
            if mesh.rank in (move.source, move.target):
                files.append(_open(move, folder, listed, mesh.rank))
    except OSError as error:
        reason = describe(error, folder)
    if reason := first_reason(reason):  # before any rank waits for a piece that never comes
        _close(files, folder)
        raise failed(folder, reason)
    try:
        reason = _carry(files, moves, folder)
        for file in files:
            if reason is None and not file.sends:
                reason = _finish(file, folder, listed[file.move.name])
    except OSError as error:  # the other ranks wait for this one's reason
        reason = describe(error, folder)
    finally:
        _close(files, folder)
    if reason := first_reason(reason):
        raise failed(folder, reason)


def _open(move: Move, folder: Path, listed: dict[str, FileRecord], rank: int) -> _File:
    sends = move.source == rank
    if sends:
        descriptor = os.open(folder / move.name, os.O_RDONLY)
    else:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(_partial(folder, move.name), flags, 0o600)
    return _File(move, descriptor, listed[move.name].num_bytes, sends)


def _carry(files: list[_File], moves: list[Move], folder: Path) -> str | None:
    """Send and receive every piece. Return an error message if a file could not be read or written,
    and otherwise None."""
    reason = None
    for start in range(0, max((file.num_bytes for file in files), default=0), PIECE_BYTES):
        work, received = [], []
        for file in files:
            if (size := min(PIECE_BYTES, file.num_bytes - start)) <= 0:
                continue
            piece, tag = torch.zeros(size, dtype=torch.uint8), moves.index(file.move)
            if file.sends:
                try:  # a short read shows in the digest
                    os.preadv(file.descriptor, [piece.numpy().data], start)
                except OSError as error:
                    reason = reason or describe(error, folder)
                work.append(dist.isend(piece, file.move.target, tag=tag))
            else:
                work.append(dist.irecv(piece, file.move.source, tag=tag))
                received.append((file, piece))
        for each in work:
            assert each is not None
            each.wait()
        for file, piece in received:
            try:
                _write(file.descriptor, memoryview(piece.numpy().data), start)
            except OSError as error:
                reason = reason or describe(error, folder)
    return reason


def _write(descriptor: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, start)
        data, start = data[written:], start + written


def _finish(file: _File, folder: Path, listed: FileRecord) -> str | None:
    """Give a received file its name and return None. If its digest is wrong, return an error message
    instead."""
    partial = _partial(folder, file.move.name)
    os.fsync(file.descriptor)
    with partial.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != listed.sha256:
        return f"{file.move.name} came from rank {file.move.source} with another SHA-256"
    partial.replace(folder / file.move.name)
    return None


def _close(files: list[_File], folder: Path) -> None:
    for file in files:
        with suppress(OSError):  # the other ranks wait for this one's reason
            os.close(file.descriptor)
        if not file.sends:
            with suppress(OSError):  # a read-only disk; the file is then left over
                _partial(folder, file.move.name).unlink(missing_ok=True)


def _partial(folder: Path, name: str) -> Path:
    return folder / f".{name}.partial"
