"""Read and write RUN/checkpoints/snapshot.json, a note that names the newest snapshot of a run and the
folders of its files.

A snapshot is valid only with this note. If no note names some snapshot files, their run was deleted or
has continued without them. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mrl.system.files import write_whole
from parallel.checkpoint import manifest

NOTE = "snapshot.json"


@dataclass(frozen=True)
class Note:
    """The note about a complete snapshot."""

    step: int
    sha256: str
    """The digest of the snapshot's manifest, which lists the digests of all other files."""
    checkpoint: int | None
    """The step of the newest checkpoint when the snapshot was taken; None if there was no
    checkpoint."""
    nodes: list[dict[str, str]]
    """For each node a dict with its `host` and the `folder` in which it keeps its part of the
    snapshot."""


def write_note(checkpoints: Path, note: Note) -> None:
    text = json.dumps(dataclasses.asdict(note), indent=1)
    write_whole(checkpoints / NOTE, text, durable=True)


def remove_note(checkpoints: Path) -> None:
    (checkpoints / NOTE).unlink(missing_ok=True)


def read_note(checkpoints: Path) -> Note | None:
    """Return the note of a run; None if there is no note, or if it is not valid."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        row = json.loads((checkpoints / NOTE).read_text())
        note = Note(**{each.name: row[each.name] for each in dataclasses.fields(Note)})
        is_sound = isinstance(note.step, int) and isinstance(note.checkpoint, int | None)
        if is_sound and all(isinstance(node["folder"], str) for node in note.nodes):
            return note
    return None


def newest_checkpoint(checkpoints: Path) -> int | None:
    """Return the step that the file LATEST names. If LATEST names no step, return the step of the
    newest checkpoint folder, or None if there is no such folder."""
    latest = manifest.latest_step(checkpoints)
    return latest if latest is not None else max(manifest.steps(checkpoints), default=None)


def note_to_resume(checkpoints: Path, num_steps: int) -> Note | None:
    """Return the note of the snapshot from which the run can resume; None if there is no such
    snapshot.

    The step of the snapshot must be after that of the newest checkpoint and before `num_steps`, and
    the run must not have been set back to an older checkpoint.
    """
    note, newest = read_note(checkpoints), newest_checkpoint(checkpoints)
    if note is None or note.step >= num_steps:
        return None
    if newest is None:
        return note if note.checkpoint is None else None
    if newest >= note.step or max(manifest.steps(checkpoints), default=newest) > newest:
        return None
    return note if note.checkpoint is None or note.checkpoint <= newest else None


def step_to_resume(checkpoints: Path, root: Path, num_steps: int) -> int | None:
    """Return the step of the snapshot that the next start will load; None if it will load no snapshot.

    `root` is this node's snapshot folder. If the run has a single node, None is also returned if a file
    of the snapshot is missing or has the wrong size. If the run has several nodes, no file is checked,
    because the files of other nodes cannot be seen here.
    """
    note = note_to_resume(checkpoints, num_steps)
    if note is None:
        return None
    folder = root / manifest.folder_name(note.step)
    if len(note.nodes) == 1 and manifest.damage(folder, digests=False) is not None:
        return None
    return note.step
