"""Create the stores of a run's checkpoints (in the run folder) and snapshots (on the nodes)."""

from __future__ import annotations

from pathlib import Path

from mrl.config import Recipe
from mrl.run import console
from mrl.run.folder import RunFolder
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.node_folder import node_folder
from parallel.checkpoint.snapshots import Snapshots
from parallel.mesh import Mesh


def make_checkpoints(recipe: Recipe, mesh: Mesh, folder: RunFolder) -> Checkpoints:
    """Return the store of a run's checkpoints. Rank 0 warns about damaged checkpoints."""
    return Checkpoints(
        folder.checkpoints,
        mesh,
        keep=recipe.checkpoint.keep,
        async_save=recipe.checkpoint.async_save,
        seed=recipe.seed,
        warn=console.warn_on(mesh.rank == 0),
        record=folder,
    )


def make_named_checkpoints(folder: Path, mesh: Mesh, seed: int) -> Checkpoints:
    """Return a store in `folder` that has one checkpoint, and belongs to no run's steps. A collective
    of ranks that share the folder."""
    if mesh.rank == 0:
        folder.parent.mkdir(exist_ok=True)  # but not the run folder, which may have been moved
    return Checkpoints(folder, mesh, keep=1, seed=seed, warn=console.warn_on(mesh.rank == 0))


def make_snapshots(recipe: Recipe, mesh: Mesh, folder: RunFolder) -> Snapshots:
    """Return the store of a run's snapshots. The store is not open yet."""
    config = recipe.checkpoint
    return Snapshots(
        folder.checkpoints,
        node_folder(folder.root, config.snapshot_folder),
        mesh,
        every=0 if recipe.debug.rollout_only else config.snapshot_every,
        num_steps=recipe.train.num_steps,
        seed=recipe.seed,
        warn=console.warn_on(mesh.rank == 0),
        record=_Rows(folder),
    )


class _Rows:
    """Supplies the data that is copied into the snapshot of a step: the rows of metrics.jsonl of
    all earlier steps.

    `settle` does nothing. A snapshot does not survive a power cut, so files need not be forced to
    the disk.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.kept = folder.kept

    def settle(self, step: int) -> None:
        pass


def has_lost_a_save(recipe: Recipe, step: int, saved: int | None) -> bool:
    """Return whether a checkpoint that was due by `step` is missing, when a run continues from a
    snapshot of `step`.

    saved: the step of the run's newest checkpoint; None if it has no checkpoint.
    """
    every = recipe.checkpoint.save_every
    return every > 0 and step // every > (saved or 0) // every
