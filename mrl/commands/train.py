"""`mrl train RECIPE [key=value ...]` trains, also under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from mrl.commands.recipe_arguments import add_allow, add_recipe, read_recipe
from mrl.errors import ExitCode
from mrl.system.imports import importing
from mrl.system.processes import die_with_torchrun
from mrl.system.stop import remember_signals


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

    stopped = train(recipe, world_size(), allowed=args.allow)
    destroy_mesh()
    if stopped:
        if os.environ.get("RANK", "0") == "0":
            print(f"mrl: {stopped}", file=sys.stderr)
            note_saved()
        sys.exit(ExitCode.SAVED)
