"""`mrl train RECIPE [key=value ...]` trains, also under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from mrl.commands.recipe_arguments import add_allow, add_recipe, read_recipe
from mrl.errors import ExitCode
from mrl.system.imports import importing
from mrl.system.processes import die_with_torchrun
from mrl.system.stop import remember_signals

if TYPE_CHECKING:
    from mrl.config import Recipe


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "train",
        help="train a recipe; continues an interrupted run",
        description="Train a recipe. A run that was interrupted continues from its newest checkpoint "
        "in output_dir, also where RECIPE is its folder; docs/checkpoints.md says what may change. "
        "On several GPUs: python -m mrl.launch --nproc-per-node N -m mrl train RECIPE.",
    )
    add_recipe(command)
    add_allow(command)
    command.set_defaults(
        run=run, after_interrupt="start again to continue from the last checkpoint"
    )


def run(args: argparse.Namespace) -> None:
    die_with_torchrun()
    remember_signals()
    recipe = read_recipe(args)
    with importing():
        from mrl.jobs.report import note_saved
        from mrl.jobs.train import train
        from parallel.mesh import destroy_mesh, world_size

    try:
        stopped = train(recipe, world_size(), allowed=args.allow)
    except KeyboardInterrupt:
        args.after_interrupt = _how_to_continue(recipe) or args.after_interrupt
        raise
    destroy_mesh()
    if stopped:
        if os.environ.get("RANK", "0") == "0":
            print(f"mrl: {stopped}", file=sys.stderr)
            note_saved()
        sys.exit(ExitCode.SAVED)


def _how_to_continue(recipe: Recipe) -> str | None:
    """Return what the run folder has and the command that continues; None if no run has begun there."""
    from mrl.jobs.restart_command import train_command
    from mrl.run.failure import saved_text
    from mrl.run.folder import RunFolder

    folder = RunFolder(recipe.output_dir)
    if not folder.config.exists():
        return None
    return f"saved: {saved_text(folder.root)}; continue with: {train_command(folder)}"
