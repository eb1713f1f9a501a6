"""Makes what a run is saved with: checkpoints in its folder, and snapshots on the nodes."""

from __future__ import annotations

from collections.abc import Callable

from mrl.config import Recipe
from mrl.run import console
from mrl.run.folder import RunFolder
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.node_folder import node_folder
from parallel.checkpoint.snapshots import Snapshots
from parallel.mesh import Mesh


def make_checkpoints(recipe: Recipe, mesh: Mesh, folder: RunFolder) -> Checkpoints:
    """Return the checkpoints of a run folder. Only rank 0 warns of damaged ones."""
    return Checkpoints(
        folder.checkpoints,
        mesh,
        keep=recipe.checkpoint.keep,
        async_save=recipe.checkpoint.async_save,
        seed=recipe.seed,
        warn=_warn(mesh),
        record=folder,
    )


def make_snapshots(recipe: Recipe, mesh: Mesh, folder: RunFolder) -> Snapshots:
    """Return the snapshots of a run, which are not open yet."""
    config = recipe.checkpoint
    return Snapshots(
        folder.checkpoints,
        node_folder(folder.root, config.snapshot_folder),
        mesh,
        every=0 if recipe.debug.rollout_only else config.snapshot_every,
        num_steps=recipe.train.num_steps,
        seed=recipe.seed,
        warn=_warn(mesh),
        record=_Rows(folder),
    )


class _Rows:
    """A snapshot keeps the rows of metrics.jsonl. It is gone after a power cut, so that no file has to
    be on the disk for it."""

    def __init__(self, folder: RunFolder) -> None:
        self.kept = folder.kept

    def settle(self, step: int) -> None:
        pass


def has_lost_a_save(recipe: Recipe, step: int, saved: int | None) -> bool:
    """Whether a run that continues from a snapshot of `step` lacks a checkpoint that was due; `saved`
    is the step of its newest one."""
    every = recipe.checkpoint.save_every
    return every > 0 and step // every > (saved or 0) // every


def _warn(mesh: Mesh) -> Callable[[str], None]:
    return console.warning if mesh.rank == 0 else lambda text: None
