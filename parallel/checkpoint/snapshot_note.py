"""RUN/checkpoints/snapshot.json names the newest snapshot of a run, and where its files lie. No torch.

A snapshot counts only with this note: what lies on a node without one belongs to a run that was deleted
or has continued from somewhere else.
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
    """A `Note` describes a snapshot that is whole."""

    step: int
    sha256: str
    """The digest of its manifest, which has the digests of its other files."""
    checkpoint: int | None
    """The step of the newest checkpoint at that time; None where there was none."""
    nodes: list[dict[str, str]]
    """`host` and `folder` of each node."""


def write_note(checkpoints: Path, note: Note) -> None:
    text = json.dumps(dataclasses.asdict(note), indent=1)
    write_whole(checkpoints / NOTE, text, durable=True)


def remove_note(checkpoints: Path) -> None:
    (checkpoints / NOTE).unlink(missing_ok=True)


def read_note(checkpoints: Path) -> Note | None:
    """Return the note of a run; None where there is none that can be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        row = json.loads((checkpoints / NOTE).read_text())
        note = Note(**{each.name: row[each.name] for each in dataclasses.fields(Note)})
        is_sound = isinstance(note.step, int) and isinstance(note.checkpoint, int | None)
        if is_sound and all(isinstance(node["folder"], str) for node in note.nodes):
            return note
    return None


def newest_checkpoint(checkpoints: Path) -> int | None:
    """Return the step that LATEST names, else that of the newest folder."""
    latest = manifest.latest_step(checkpoints)
    return latest if latest is not None else max(manifest.steps(checkpoints), default=None)


def note_to_resume(checkpoints: Path, num_steps: int) -> Note | None:
    """Return the note of a snapshot that is newer than the newest checkpoint, within `num_steps`.

    None also where the run was set back to an older checkpoint.
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
    """Return the step of the snapshot that a start is going to load; `root` is this node's folder.

    Files on other nodes cannot be seen here; those of a run on one node are looked for.
    """
    note = note_to_resume(checkpoints, num_steps)
    if note is None:
        return None
    folder = root / manifest.folder_name(note.step)
    if len(note.nodes) == 1 and manifest.damage(folder, digests=False) is not None:
        return None
    return note.step
