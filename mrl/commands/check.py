"""`mrl check RECIPE [key=value ...]` validates a recipe and prints what it would run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mrl.commands.recipe_arguments import add_allow, add_recipe, read_recipe
from mrl.errors import InputError


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "check",
        help="validate a recipe and print what it would run",
        description="Validate a recipe, its model, data and reward, and print what would run. Nothing "
        "is trained or written. With --plan, predict memory, traffic and time of a step instead.",
    )
    add_recipe(command)
    add_allow(command)
    _add_plan(command)
    command.add_argument(
        "--ignore-memory",
        action="store_true",
        help="on a machine with GPUs: accept a recipe that does not fit into their memory by the plan",
    )
    command.add_argument(
        "--deep",
        action="store_true",
        help="look for NaN and infinity in every number of the weights, not in a sample",
    )
    command.add_argument(
        "--versions",
        action="store_true",
        help="first print the versions of the packages, and what each implies",
    )
    command.set_defaults(run=run)


def _add_plan(command: argparse.ArgumentParser) -> None:
    """Add `--plan` and its options."""
    command.add_argument(
        "--plan",
        action="store_true",
        help="predict memory, traffic and time of a step on GPUs; needs only config.json of the model",
    )
    command.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="check or plan for N ranks, also on a machine without GPUs; by default for the ranks of "
        "this start",
    )
    command.add_argument("--gpu", metavar="NAME", help="with --plan: h100 (default) or h200")
    command.add_argument(
        "--prompt-len", type=int, metavar="N", help="with --plan: tokens of a prompt (default 512)"
    )
    command.add_argument(
        "--host-memory",
        type=float,
        metavar="GB",
        help="with --plan: memory of a node in gigabytes (default 2,199)",
    )
    command.add_argument(
        "--response-len",
        type=int,
        metavar="N",
        help="with --plan of a disaggregated recipe: tokens of the mean response (default: all are as "
        "long as allowed)",
    )
    command.add_argument(
        "--measured",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="with --plan: take the seconds of a step from the metrics of these runs (one colocated, "
        "one disaggregated, or one of each)",
    )


def run(args: argparse.Namespace) -> None:
    recipe = read_recipe(args)
    from mrl.run import console

    if args.versions:
        from parallel.versions import version_rows

        console.table("Versions", ("package", "version", "what it implies"), version_rows())
    if args.plan:
        from mrl.commands.scaling_plan import show_plan

        show_plan(
            recipe,
            args.gpus,
            args.gpu,
            args.prompt_len,
            args.host_memory,
            response_len=args.response_len,
            measured=args.measured or (),
        )
        return
    for name in ("gpu", "prompt_len", "host_memory", "response_len", "measured"):
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} needs --plan; add it")
    import torch

    from mrl.preflight import check
    from mrl.preflight.hints import hints
    from mrl.preflight.ranks import check_ranks
    from mrl.preflight.room import check_room
    from parallel.mesh import world_size

    world = world_size() if args.gpus is None else args.gpus
    if world < 1:
        raise InputError(f"--gpus: got {world}, expected at least 1")
    check_ranks(recipe, world, "check")
    elsewhere = args.gpus is not None and not torch.cuda.is_available()
    plan = check(recipe, world, elsewhere=elsewhere, allowed=args.allow, deep=args.deep)
    room = "" if elsewhere else check_room(plan, console.warning)
    console.pairs([*plan.rows(elsewhere=elsewhere), *([("disk", room)] if room else [])])
    for hint in hints(plan.recipe, on_gpu=elsewhere or torch.cuda.is_available()):
        print(f"hint: {hint}")
    if elsewhere:
        print(
            f"checked for {world} GPU(s), which this machine does not have: checks that need them are "
            "done where the run starts (mrl check --plan predicts the memory)"
        )
    if args.gpus is None and not args.ignore_memory:
        from mrl.commands.scaling_plan import check_memory

        if memory := check_memory(recipe, world):
            print(f"memory: {memory}")
    print("ok")
