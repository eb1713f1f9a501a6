"""Checks that the data of a resumed run fits the data position in its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mrl.config import Recipe
from mrl.data import PromptCursor, Source
from mrl.errors import InputError
from mrl.preflight.resume import resume_step, snapshot_step
from mrl.run.changes import is_in
from mrl.run.folder import RunFolder
from mrl.run.history import Update
from mrl.run.pending_prompts import read_pending
from mrl.run.source import load_run
from parallel.checkpoint.manifest import Damaged, folder_name, read_manifest
from parallel.checkpoint.node_folder import node_folder


def steps_done(
    folder: RunFolder,
    recipe: Recipe,
    sources: Sequence[Source],
    update: Update,
    warn: Callable[[str], None],
) -> tuple[int | None, int | None]:
    """Return the steps done in the newest checkpoint, and in the checkpoint or snapshot that the run
    continues from, after checking the data position."""
    checkpoint_step = resume_step(folder, warn)
    step = snapshot_step(folder, recipe, warn) or checkpoint_step
    check_data_position(folder, recipe, sources, update, step, warn)
    return checkpoint_step, step


def check_data_position(
    folder: RunFolder,
    recipe: Recipe,
    sources: Sequence[Source],
    update: Update,
    step: int | None,
    warn: Callable[[str], None],
) -> None:
    """Check, before anything is written to the run folder, that training can continue at the data
    position after `step` steps; `step` is None for a new run.

    If the data has changed since then and `--allow` permits it, training starts over at the first rows,
    and `warn(text)` says so. Raises InputError for a change that was not allowed. On rank 0 only.
    """
    if step is None or os.environ.get("RANK", "0") != "0":
        return
    state = _saved_position(folder, recipe, step)
    if state is None:
        return
    changed = any(is_in(c.key, "data") and not c.is_moved for c in update.changes)
    if changed or folder.history.has_other_data(step):
        if why := why_other_data(folder, recipe, sources, state, step):
            warn(f"all data starts over at its first rows, as it is not that of step {step}: {why}")
    elif why := _why_other_rows(recipe, sources, state) or _why_other_rewards(recipe, state):
        raise InputError(f"cannot resume: {why}")


def why_other_data(
    folder: RunFolder, recipe: Recipe, sources: Sequence[Source], state: dict[str, Any], step: int
) -> str:
    """Return why changed data cannot continue from a collector's `state` after `step` steps; empty if
    it can."""
    if why := _why_other_rows(recipe, sources, state):
        return why
    before = load_run(folder.root, config=folder.history.config_at(step)).data.rewards
    lost = [reward for reward in before if reward not in recipe.data.rewards]
    # Pending prompts would still have to be scored by it.
    return f"a source had the reward {lost[0]}" if lost else ""


def _why_other_rewards(recipe: Recipe, state: dict[str, Any]) -> str:
    """Return an error if a pending prompt could not be scored, because no source has its reward now."""
    for one in read_pending(state):
        reward = one.group.prompt.reward
        if reward is not None and not one.is_scored and reward not in recipe.data.rewards:
            return (
                f"{one.group.prompt.source} is pending in the checkpoint and has to be scored by "
                f"{reward}, which no source has now; restore that reward, or start a new run"
            )
    return ""


def _why_other_rows(recipe: Recipe, sources: Sequence[Source], state: dict[str, Any]) -> str:
    if "seed" not in state:  # saved rollouts draw no prompts
        return ""
    cursor = PromptCursor(sources, seed=recipe.seed, shuffle=recipe.data.shuffle)
    return cursor.why_other(state)


def _saved_position(folder: RunFolder, recipe: Recipe, step: int) -> dict[str, Any] | None:
    """Return the collector's state in the checkpoint or the snapshot of `step`; None if neither can be
    read."""
    if recipe.debug.load_rollouts is not None:
        return None
    snapshots = node_folder(folder.root, recipe.checkpoint.snapshot_folder)
    for root in (folder.checkpoints, snapshots):
        with suppress(Damaged, InputError, KeyError, TypeError):
            return read_manifest(root / folder_name(step))["trainer"]["collector"]
    return None
