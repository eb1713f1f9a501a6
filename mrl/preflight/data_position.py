"""Check that a resumed run can continue at the data position in its checkpoint.

The data position says which prompts of each source come next.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mrl.config import Recipe
from mrl.data.cursor import PromptCursor
from mrl.data.reader import Source
from mrl.errors import InputError
from mrl.preflight.resume import resume_step, snapshot_step
from mrl.run.changes import is_in
from mrl.run.folder import RunFolder
from mrl.run.history import Update, allows_rows
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
    *,
    trains: bool = True,
) -> tuple[int | None, int | None]:
    """Check the data position; return the newest checkpoint's step and the step to continue from.

    The position is not checked unless the recipe `trains`.

    The step of a checkpoint or snapshot is the number of training steps that were done when it was
    saved. The run continues from a snapshot if the snapshot is newer than every checkpoint. The
    first result is None if there is no checkpoint. The second is None if the run is new.
    """
    checkpoint_step = resume_step(folder, warn)
    step = snapshot_step(folder, recipe, warn) or checkpoint_step
    if trains:  # an evaluation takes no prompts from the training data
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
    """Check that training can continue at the data position that was saved after `step` steps.

    If the recipe's data does not fit the saved position, the result depends on whether the data was
    allowed to change since the position was saved: a key of `data` has changed, or a start was given
    `--allow data`. In that case training will start over at the first rows, and `warn(text)` is called
    with the reason. Otherwise InputError is raised.

    Nothing is checked if the run is new (`step` is None), if no saved position can be read, or on
    ranks other than 0.
    """
    if step is None or os.environ.get("RANK", "0") != "0":
        return
    state = _saved_position(folder, recipe, step)
    if state is None:
        return
    changed = any(is_in(c.key, "data") and not c.is_moved for c in update.changes)
    if changed or allows_rows(update.allowed) or folder.history.may_have_other_rows(step):
        if why := why_other_data(folder, recipe, sources, state, step):
            warn(
                f"all data starts over at its first rows, because it has changed since step {step}: "
                f"{why}"
            )
    elif why := _why_other_rows(recipe, sources, state):
        again = f"mrl train {shlex.quote(str(folder.root))} --allow data"
        raise InputError(f"cannot resume: {why}, or start over at the first rows with: {again}")
    elif why := _why_other_rewards(recipe, state):
        raise InputError(f"cannot resume: {why}")


def why_other_data(
    folder: RunFolder, recipe: Recipe, sources: Sequence[Source], state: dict[str, Any], step: int
) -> str:
    """Return why a run whose data has changed cannot continue at its saved data position.

    `state` is the collector's state that was saved after `step` steps. The result is empty if the
    run can continue at that position.
    """
    if why := _why_other_rows(recipe, sources, state):
        return why
    before = load_run(folder.root, config=folder.history.config_at(step)).data.rewards
    lost = [reward for reward in before if reward not in recipe.data.rewards]
    # Pending prompts of a source whose reward was removed would still need that reward.
    return f"a source had the reward {lost[0]}" if lost else ""


def _why_other_rewards(recipe: Recipe, state: dict[str, Any]) -> str:
    """Return an error message if a pending prompt needs a reward that the recipe no longer has.

    A prompt is pending if it was taken from the data, but no step has trained on it. Only pending
    prompts that have not been scored are checked. The result is empty if all of them can be scored.
    """
    for one in read_pending(state):
        reward = one.group.prompt.reward
        if reward is not None and not one.is_scored and reward not in recipe.data.rewards:
            return (
                f"{one.group.prompt.source} is pending in the checkpoint and must be scored with "
                f"{reward}, which no source has now; restore that reward, or start a new run"
            )
    return ""


def _why_other_rows(recipe: Recipe, sources: Sequence[Source], state: dict[str, Any]) -> str:
    if "seed" not in state:  # a run with saved rollouts takes no prompts from the data
        return ""
    cursor = PromptCursor(sources, seed=recipe.seed, shuffle=recipe.data.shuffle)
    return cursor.why_other(state)


def _saved_position(folder: RunFolder, recipe: Recipe, step: int) -> dict[str, Any] | None:
    """Return the collector's state, which holds the data position, from the checkpoint of `step`.

    If that checkpoint cannot be read, the state is taken from the snapshot of `step`. The result is
    None if neither of them can be read, or if the run uses saved rollouts.
    """
    if recipe.debug.load_rollouts is not None:
        return None
    snapshots = node_folder(folder.root, recipe.checkpoint.snapshot_folder)
    for root in (folder.checkpoints, snapshots):
        with suppress(Damaged, InputError, KeyError, TypeError):
            return read_manifest(root / folder_name(step))["trainer"]["collector"]
    return None
