"""States and samplers that sessions have saved under a name, as they are in a run folder.

RUN_FOLDER/states/NAME/iter_0000007/     weights and Adam's state at version 7
RUN_FOLDER/samplers/NAME/iter_0000007/   weights alone

Both are checkpoints (`parallel.checkpoint.manifest`), so `mrl export` reads them. The session need not
be open.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mrl.errors import InputError
from parallel.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    candidates,
    read_manifest,
    step_of,
    steps,
)
from parallel.checkpoint.manifest import folder_name as iteration_name

Kind = Literal["states", "samplers"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Saved:
    """A saved state or sampler."""

    name: str
    version: int
    """The version of the session's weights that were saved."""
    num_bytes: int
    time_s: float
    """When it was complete, in seconds since 1970."""
    folder: Path
    """The checkpoint's folder."""


def folder_of(run_folder: Path, kind: Kind, name: str) -> Path:
    """Return the folder of what is saved under `name`. Raises InputError for another kind of name."""
    if not NAME.fullmatch(name):
        raise InputError(
            f"{name[:80]!r} is no name of a {kind[:-1]}; expected 1 to 100 letters, digits, '.', '_' "
            "and '-', of which the first is a letter or a digit"
        )
    return run_folder / kind / name


def find(run_folder: Path, kind: Kind, name: str) -> Path | None:
    """Return the checkpoint's folder of what is saved under `name`; None if there is none."""
    found = candidates(folder_of(run_folder, kind, name))
    return found[0] if found and (found[0] / MANIFEST).is_file() else None


def require(run_folder: Path, kind: Kind, name: str) -> Path:
    """Return the checkpoint's folder of what is saved under `name`. Raises InputError if there is none,
    with the names that there are."""
    if (found := find(run_folder, kind, name)) is None:
        there = ", ".join(each.name for each in saved(run_folder, kind)[-20:]) or "none"
        raise InputError(f"there is no {kind[:-1]} {name!r} of this session; there are: {there}")
    return found


def require_checkpoint(folder: Path, *, with_optimizer: bool) -> Path:
    """Return `folder`. Raises InputError if it is no checkpoint's folder, or has no optimizer state
    although that is wanted."""
    if not (folder / MANIFEST).is_file():
        raise InputError(
            f"there is no checkpoint in {folder}; expected a folder that save or save_sampler returned"
        )
    with suppress(Damaged, OSError):  # whoever loads it says what is wrong
        if with_optimizer and read_manifest(folder)["trainer"].get("weights_only"):
            raise InputError(
                f"{folder} is a sampler, which has no optimizer state; set optimizer to false"
            )
    return folder


def saved(run_folder: Path, kind: Kind) -> list[Saved]:
    """Return everything of a kind that is saved, the oldest first. What is damaged is left out."""
    names = [each.name for each in (run_folder / kind).glob("*") if NAME.fullmatch(each.name)]
    return sorted(
        (one for name in names if (one := describe(run_folder, kind, name)) is not None),
        key=lambda one: (one.time_s, one.name),
    )


def describe(run_folder: Path, kind: Kind, name: str) -> Saved | None:
    """Return what is saved under `name`; None if there is none, or it is damaged."""
    if (folder := find(run_folder, kind, name)) is None:
        return None
    try:
        files = read_manifest(folder)["files"]
        time_s = (folder / MANIFEST).stat().st_mtime
    except (Damaged, OSError):
        return None
    num_bytes = sum(int(each["bytes"]) for each in files.values())
    return Saved(name, step_of(folder), num_bytes, time_s, folder)


def remove_saved(run_folder: Path, kind: Kind, name: str) -> bool:
    """Remove what is saved under `name`; return False if there is none."""
    folder = folder_of(run_folder, kind, name)
    if find(run_folder, kind, name) is None:
        return False
    gone = folder.with_name(f".{name}.removed")  # a half-removed folder must not have its name
    shutil.rmtree(gone, ignore_errors=True)
    try:
        folder.rename(gone)
    except FileNotFoundError:  # another thread was first
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True


def keep_one(folder: Path, version: int) -> None:
    """Remove all checkpoints in `folder` but that of `version`."""
    for step in steps(folder):
        if step != version:
            shutil.rmtree(folder / iteration_name(step), ignore_errors=True)
