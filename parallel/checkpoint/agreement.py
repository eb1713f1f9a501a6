"""What one rank finds or does to a checkpoint folder, made known to all: they return or raise together.

Every function is a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch.distributed as dist

from mrl.errors import DiskFailed, InputError, RunFailed
from mrl.system.disk import describe, is_refusal
from parallel.checkpoint import manifest
from parallel.mesh import Mesh


def first_reason(mesh: Mesh, reason: str | None) -> str | None:
    """Return the reason of the lowest rank that has one, on every rank."""
    reasons: list[str | None] = [None] * mesh.dims.world
    dist.all_gather_object(reasons, reason)
    return next((each for each in reasons if each is not None), None)


def find_damage(mesh: Mesh, folder: Path) -> str | None:
    """Return what `manifest.damage` finds; the ranks share the hashing and agree on the verdict.

    Raises InputError, on every rank, where it does on one.
    """
    rank, world = mesh.rank, mesh.dims.world
    try:
        reason, refusal = manifest.damage(folder, rank=rank, world=world), None
    except InputError as error:
        reason, refusal = None, str(error)
    if refusal := first_reason(mesh, refusal):
        raise InputError(refusal)
    return first_reason(mesh, reason)


def on_first_rank(mesh: Mesh, folder: Path, work: Callable[[], None]) -> None:
    """Do the file work of rank 0; see `on_ranks`."""
    on_ranks(mesh, (0,), folder, work)


def on_ranks(mesh: Mesh, ranks: Collection[int], folder: Path, work: Callable[[], None]) -> None:
    """Do the file work of `ranks`. Raises RunFailed, or DiskFailed, on every rank when it fails on one,
    in whatever way."""
    reason = None
    if mesh.rank in ranks:
        try:
            work()
        except Exception as error:
            reason = describe(error, folder)
    if reason := first_reason(mesh, reason):
        raise failed(folder, reason)


def failed(folder: Path, reason: str) -> RunFailed:
    """Return the error of a checkpoint that could not be written; `reason` is what `describe` says."""
    kind = DiskFailed if is_refusal(reason) else RunFailed
    return kind(f"checkpoint {folder}: {reason}; the one before it is untouched")
