"""Find the checkpoint or snapshot that a run continues from, and check its metrics and adapter."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from mrl.config import Recipe
from mrl.config.adapter import Adapter
from mrl.errors import InputError
from mrl.run import metric_rows
from mrl.run.folder import RunFolder
from parallel.checkpoint.manifest import (
    Damaged,
    candidates,
    damage,
    folder_name,
    newest_good,
    read_manifest,
    step_of,
)
from parallel.checkpoint.model_identity import other_adapter, saved_adapter
from parallel.checkpoint.node_folder import node_folder
from parallel.checkpoint.snapshot_note import step_to_resume


def resume_step(folder: RunFolder, warn: Callable[[str], None]) -> int | None:
    """Return the step of the newest undamaged checkpoint; None if the run has no checkpoints.

    This function checks only the names and sizes of the checkpoint's files; the ranks check the
    digests when they load the checkpoint. `warn(text)` is called for damaged checkpoints. On rank 0
    it is also called if rows of metrics.jsonl are missing or damaged; the run restores these rows
    from the checkpoint when it starts. Raises InputError if the rows cannot be restored, or if all
    checkpoints are damaged.
    """
    found = newest_good(candidates(folder.checkpoints), partial(damage, digests=False), warn)
    if found is None:
        return None
    step = step_of(found)
    if os.environ.get("RANK", "0") == "0" and (
        wrong := metric_rows.find_damage(folder.metrics, found, step)
    ):
        warn(f"{wrong}; training continues with the copy in checkpoint {found.name}")
    return step


def check_adapter(folder: RunFolder, adapter: Adapter | None) -> None:
    """Raise InputError if the adapter in the newest checkpoint is not the one that the run trains.

    InputError is also raised if only the checkpoint or only the run has an adapter. Nothing is
    checked without a readable checkpoint.
    """
    for found in candidates(folder.checkpoints):
        try:
            saved = read_manifest(found)["model"]
        except Damaged:  # `resume_step` reports it
            continue
        if reason := other_adapter(saved_adapter(saved), adapter):
            raise InputError(f"checkpoint {found} {reason}")
        return


def snapshot_step(folder: RunFolder, recipe: Recipe, warn: Callable[[str], None]) -> int | None:
    """Return the step of this node's snapshot if it is newer than every checkpoint, else None.

    The rows of metrics.jsonl are checked in the same way as in `resume_step`.
    """
    root = node_folder(folder.root, recipe.checkpoint.snapshot_folder)
    step = step_to_resume(folder.checkpoints, root, recipe.train.num_steps)
    if step is None or os.environ.get("RANK", "0") != "0":
        return step
    found = root / folder_name(step)
    if found.exists() and (wrong := metric_rows.find_damage(folder.metrics, found, step)):
        warn(f"{wrong}; training continues with the copy in snapshot {found}")
    return step
