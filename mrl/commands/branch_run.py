"""Make a new run from a checkpoint of another run. The other run is not changed.

The checkpoint's files are hard links if the file system allows it, and copies otherwise. Links are
safe: mrl never writes into a finished checkpoint, and removing one of two links keeps the file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mrl.config import dump_recipe
from mrl.errors import DiskFailed, InputError
from mrl.run.changes import Change, check_allowed
from mrl.run.contents import contents_of
from mrl.run.folder import RunFolder, as_lines
from mrl.run.history import changes_to
from mrl.run.source import is_run, load_run
from mrl.system.disk import refusal
from mrl.system.files import write_whole
from parallel.checkpoint.manifest import candidates, damage, folder_name, point_to, staying, step_of


@dataclass(frozen=True)
class Branched:
    """The result of `branch`."""

    parent: Path
    step: int
    """The number of steps done at the checkpoint. The new run's first step has this number."""
    changes: Sequence[Change]


def branch(source: str, target: Path, overrides: list[str]) -> Branched:
    """Make a new run in the folder `target` from a checkpoint of another run.

    `source` is `RUN`, for the newest checkpoint, or `RUN@STEP`. `overrides` (`key=value`) change the
    recipe. The new run gets the checkpoint, and the metrics of the steps before that checkpoint. Raises
    InputError if the checkpoint does not exist or is damaged, if `target` is not empty, if an
    override changes a key that cannot change in a run, or if the recipe has `train.num_epochs`, and
    DiskFailed if the disk is full or read-only. After an error, `target` is as it was before.
    """
    parent, step = _parse(source)
    load_run(parent)  # raises InputError if it is not the folder of a run
    checkpoint = _checkpoint(parent, step)
    step = step_of(checkpoint)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists already; give a new or an empty folder")
    config = RunFolder(parent).history.config_at(step)
    recipe = load_run(parent, _without_output(overrides, target), config)
    recipe = recipe.model_copy(update={"output_dir": str(target)})
    if recipe.train.num_epochs is not None:
        raise InputError(
            f"train.num_epochs={recipe.train.num_epochs:g}: a branch needs a number of steps, counted "
            "from the start of its parent; give train.num_steps"
        )
    # They import torch, which bad input above does not need.
    from mrl.algorithms import load_algorithm, traits
    from mrl.preflight.algorithm import check_critic_stays
    from mrl.preflight.schedule import with_decay

    recipe = with_decay(recipe)
    contents = contents_of(recipe)
    changes = changes_to(parent, recipe, contents, step)
    check_allowed(changes, [c.key for c in changes], str(parent), f"a branch of {parent}")
    needs_critic = traits(load_algorithm(recipe.algorithm.name)).needs_critic
    check_critic_stays(changes, needs_critic)
    rows = [row for row in RunFolder(parent).read_metrics() if row["step"] < step]
    folder = RunFolder(target)
    was_there = target.exists()
    try:
        folder.checkpoints.mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"another process is making {target}; give another folder") from None
    except OSError as error:
        raise _refused(error, target) from None
    with staying(checkpoint), _removing(target, was_there=was_there):
        _link(checkpoint, folder.checkpoints / checkpoint.name)
        point_to(folder.checkpoints, step)
        write_whole(folder.metrics, as_lines(rows))
        folder.history.add("branch", step, changes, contents, parent=str(parent.resolve()))
        dump_recipe(recipe, folder.config)
    return Branched(parent, step, changes)


@contextmanager
def _removing(target: Path, *, was_there: bool) -> Iterator[None]:
    """Remove what is in the folder `target`, and the folder unless it `was_there`, if the `with` block
    fails, so that the same command can be given again. An OSError becomes the error of `_refused`."""
    try:
        yield
    except BaseException as error:
        for made in list(target.iterdir()) if was_there else [target]:
            if made.is_dir():
                shutil.rmtree(made, ignore_errors=True)
            else:
                made.unlink(missing_ok=True)
        raise (_refused(error, target) if isinstance(error, OSError) else error) from None


def _refused(error: OSError, target: Path) -> DiskFailed | InputError:
    """Return the error for a file that could not be read, or not be written into `target`."""
    if text := refusal(error, target):
        return DiskFailed(text)
    what = target if error.filename is None else os.fsdecode(error.filename)
    return InputError(f"{what}: {error.strerror}; no branch was made, give another folder")


def _parse(source: str) -> tuple[Path, int | None]:
    run, at, step = source.rpartition("@")
    if at and step.isascii() and step.isdigit():
        if is_run(Path(source)) and not is_run(Path(run)):
            return Path(source), None
        if is_run(Path(source)):
            raise InputError(
                f"{source} is the folder of a run, and also step {step} of the run {run}; write "
                f"{source}/ for the newest checkpoint of the first, or {run}/@{step} for the second"
            )
        return Path(run), int(step)
    if at and not Path(source).exists():
        raise InputError(f"{source}: expected RUN or RUN@STEP, such as runs/first@200")
    return Path(source), None


def _checkpoint(run: Path, step: int | None) -> Path:
    """Return the folder of the run's checkpoint after `step` steps; None means the newest checkpoint.

    Raises InputError if the checkpoint does not exist or is damaged.
    """
    root = run / "checkpoints"
    found = sorted((p for p in root.glob("iter_*") if p.name[5:].isdigit()), reverse=True)
    steps = ", ".join(str(step_of(path)) for path in reversed(found)) or "none"
    newest = candidates(root)
    if step is not None:
        newest = [root / folder_name(step)]
    if not newest or not newest[0].is_dir():
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        why = "; checkpoint.save_every and checkpoint.keep decide which there are" if found else ""
        raise InputError(f"{run} has {which}; it has checkpoints of these steps: {steps}{why}")
    if reason := damage(newest[0]):
        raise InputError(
            f"checkpoint {newest[0].name} is damaged: {reason}; name another step, {run}@STEP; it has "
            f"checkpoints of these steps: {steps}"
        )
    return newest[0]


def _without_output(overrides: list[str], target: Path) -> list[str]:
    for item in overrides:
        if item.startswith("output_dir="):
            raise InputError(f"{item}: the new run is in {target}; leave it out")
    return overrides


def _link(source: Path, target: Path) -> None:
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except OSError:  # on another file system, or on one without hard links
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, copy_function=_copy)


def _copy(source: str, target: str) -> None:
    """Copy a file of a checkpoint. Raises the error of `_refused` if it cannot be copied, because
    `copytree` would collect an OSError in an exception that names no reason."""
    try:
        shutil.copy2(source, target)
    except OSError as error:
        raise _refused(error, Path(target)) from None
