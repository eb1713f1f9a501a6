"""`mrl check RECIPE [key=value ...]` validates a recipe and prints what it would run."""

from __future__ import annotations

import argparse
from typing import Any

from mrl.commands.recipe_arguments import add_recipe, read_recipe
from mrl.errors import InputError


def add_to(commands: Any) -> None:
    command = commands.add_parser("check", help="validate a recipe and print the plan")
    add_recipe(command)
    command.add_argument(
        "--plan",
        action="store_true",
        help="memory, traffic and estimated time of a step; config.json of the model is enough",
    )
    command.add_argument("--gpus", type=int, help="ranks of the plan; by default this start's")
    command.add_argument("--gpu", help="h100 (default) or h200")
    command.add_argument(
        "--prompt-len", type=int, help="tokens of a prompt in the plan; by default 512"
    )
    command.add_argument(
        "--host-memory",
        type=float,
        help="gigabytes of a node's memory in the plan; by default 2,199",
    )
    command.add_argument(
        "--ignore-memory",
        action="store_true",
        help="on a machine with GPUs, accept a recipe that by the formulas does not fit into them",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    recipe = read_recipe(args)
    from mrl.run import console
    from parallel.versions import version_rows

    console.table("Versions", ("package", "version", "what it implies"), version_rows())
    if args.plan:
        from mrl.commands.scaling_plan import show_plan

        show_plan(recipe, args.gpus, args.gpu, args.prompt_len, args.host_memory)
        return
    for name in ("gpus", "gpu", "prompt_len", "host_memory"):
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} is for the plan; add --plan")
    from mrl.preflight import check
    from parallel.mesh import world_size

    console.plan(check(recipe, world_size()).rows())
    if not args.ignore_memory:
        from mrl.commands.scaling_plan import check_memory

        if memory := check_memory(recipe, world_size()):
            print(f"memory: {memory}")
    print("ok")
