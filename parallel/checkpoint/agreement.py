"""Let all ranks agree on what one rank has found in a checkpoint folder, or on whether its work in
that folder has succeeded.

The ranks return together or raise together. Every function except `failed` is a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from mrl.errors import DiskFailed, InputError, RunFailed
from mrl.system.disk import describe, is_refusal
from parallel.checkpoint import manifest
from parallel.mesh import Mesh, gather_objects


def first_reason(reason: str | None) -> str | None:
    """Return the `reason` of the lowest rank that passes one; None if every rank passes None. All
    ranks get the same result."""
    return next((each for each in gather_objects(reason) if each is not None), None)


def find_damage(mesh: Mesh, folder: Path) -> str | None:
    """Return a message that says what is wrong with a checkpoint; None if it is not damaged (see
    `manifest.damage`). The ranks divide the hashing, and all return the same result.

    Raises InputError on every rank if `manifest.damage` raises it on one rank.
    """
    rank, world = mesh.rank, mesh.dims.world
    try:
        reason, refusal = manifest.damage(folder, rank=rank, world=world), None
    except InputError as error:
        reason, refusal = None, str(error)
    if refusal := first_reason(refusal):
        raise InputError(refusal)
    return first_reason(reason)


def on_first_rank(mesh: Mesh, folder: Path, work: Callable[[], None]) -> None:
    """Run `work` on rank 0, and wait for it on all ranks (see `on_ranks`)."""
    on_ranks(mesh, (0,), folder, work)


def on_ranks(mesh: Mesh, ranks: Collection[int], folder: Path, work: Callable[[], None]) -> None:
    """Run `work`, which handles files in `folder`, on `ranks`, and wait for it on all ranks.

    If `work` raises any exception on one rank, every rank raises RunFailed (DiskFailed if the disk
    is the reason).
    """
    reason = None
    if mesh.rank in ranks:
        try:
            work()
        except Exception as error:
            reason = describe(error, folder)
    if reason := first_reason(reason):
        raise failed(folder, reason)


def failed(folder: Path, reason: str) -> RunFailed:
    """Return the error for a checkpoint that could not be written. `reason` is a string that
    `mrl.system.disk.describe` returned."""
    kind = DiskFailed if is_refusal(reason) else RunFailed
    return kind(f"checkpoint {folder}: {reason}; the one before it is untouched")
