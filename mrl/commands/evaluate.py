"""`mrl eval RECIPE [key=value ...]` evaluates a checkpoint or a model, also under torchrun."""

from __future__ import annotations

import argparse
import os
import shlex
from typing import Any

from mrl.commands.recipe_arguments import add_recipe, read_recipe
from mrl.errors import InputError
from mrl.system.processes import die_with_torchrun

STEP_KEYS = ("step", "checkpoint_step", "iteration", "iter")
"""Words that users give as a key of the recipe, and that mean `--step`."""


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "eval",
        help="evaluate a checkpoint, or the model, on the recipe's eval sets",
        description="Generate answers to the prompts of the recipe's eval.sets and print avg@k and "
        "pass@k, for the newest checkpoint in output_dir, or for the model where there is none.",
    )
    add_recipe(command)
    command.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="take the checkpoint after N steps; by default the newest",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    die_with_torchrun()
    _refuse_other_spellings(args)
    recipe = read_recipe(args)
    from mrl.jobs.evaluate import evaluate_recipe
    from mrl.run import console
    from parallel.mesh import destroy_mesh, world_size

    step, metrics, samples = evaluate_recipe(recipe, world_size(), args.step, str(args.recipe))
    if os.environ.get("RANK", "0") == "0":
        console.evaluation(metrics)
        what = f"the weights after {step} steps" if step else recipe.model.path
        print(f"evaluated {what}; samples: {samples}")
    destroy_mesh()


def _refuse_other_spellings(args: argparse.Namespace) -> None:
    """Raise InputError if the step is given as a key (`step=20`), or as `mrl branch` takes it
    (`RUN@20`)."""
    run, at, step = str(args.recipe).rpartition("@")
    found = [(run, step)] if at and step.isdecimal() and not args.recipe.exists() else []
    for key, _, value in (item.partition("=") for item in args.overrides):
        found += [(str(args.recipe), value)] if key in STEP_KEYS else []
    if found:
        command = shlex.join(["mrl", "eval", found[0][0], "--step", found[0][1]])
        raise InputError(f"eval takes the step of a checkpoint as an option: {command}")
