"""Checks what a run continues from: its checkpoint or snapshot, and the rows of the steps before it."""

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
    """Return the newest checkpoint that is all there. The ranks share the hashing when they load it.

    Rows of metrics.jsonl that the start brings back are reported. Raises InputError where it cannot.
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
    """Raise InputError where the newest checkpoint holds another adapter than the run trains, or all
    weights where it trains an adapter, or the other way round."""
    for found in candidates(folder.checkpoints):
        try:
            saved = read_manifest(found)["model"]
        except Damaged:  # `resume_step` says so
            continue
        if reason := other_adapter(saved_adapter(saved), adapter):
            raise InputError(f"checkpoint {found} {reason}")
        return


def snapshot_step(folder: RunFolder, recipe: Recipe, warn: Callable[[str], None]) -> int | None:
    """Return the step of the snapshot that is newer than every checkpoint, as far as this node can
    tell; None where there is none. Its rows are checked as those of a checkpoint are."""
    root = node_folder(folder.root, recipe.checkpoint.snapshot_folder)
    step = step_to_resume(folder.checkpoints, root, recipe.train.num_steps)
    if step is None or os.environ.get("RANK", "0") != "0":
        return step
    found = root / folder_name(step)
    if found.exists() and (wrong := metric_rows.find_damage(folder.metrics, found, step)):
        warn(f"{wrong}; training continues with the copy in snapshot {found}")
    return step
