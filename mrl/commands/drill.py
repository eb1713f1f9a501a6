"""`mrl drill RECIPE` provokes faults in runs of a recipe on this machine, and prints what happened
after each fault."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.commands.recipe_arguments import add_recipe, read_recipe
from mrl.errors import ExitCode, InputError

if TYPE_CHECKING:
    from mrl.config import Recipe
    from mrl.drill import Row


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "drill",
        help="provoke faults in a recipe on this machine, and check that it recovers from each",
        description="Run a recipe for a few steps in a scratch folder, provoke one fault after the "
        "other, and check how each ends: exit code, report, processes and files left behind, and that "
        "the continued run has the bits of one without a fault. docs/faults.md describes the faults.",
    )
    add_recipe(command, is_optional=True)
    command.add_argument(
        "--only", nargs="+", action="extend", metavar="FAULT", help="provoke these faults only"
    )
    command.add_argument(
        "--steps", type=int, metavar="N", help="steps of the run without a fault (default 16)"
    )
    command.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks to start (default: all GPUs that the layout can use; without GPUs the fewest)",
    )
    command.add_argument(
        "--folder", type=Path, help="scratch folder (default: OUTPUT_DIR_drill, next to output_dir)"
    )
    command.add_argument(
        "--list", action="store_true", help="print the faults and exit; RECIPE may be left out"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object per fault")
    command.set_defaults(
        run=run, after_interrupt="no process remains; the scratch folder holds the logs"
    )


def run(args: argparse.Namespace) -> None:
    from mrl.drill import FEWEST_LEFT, NUM_STEPS, drill, not_provoked
    from mrl.preflight import check

    names = _names(args)
    if args.list:
        _list(None if args.recipe is None else read_recipe(args), names)
        return
    if args.recipe is None:
        raise InputError(
            "mrl drill: got no RECIPE, expected that of the run; mrl drill --list needs none"
        )
    recipe = read_recipe(args)
    num_steps = args.steps or NUM_STEPS
    if num_steps <= FEWEST_LEFT:
        raise InputError(f"--steps: got {num_steps}, expected more than {FEWEST_LEFT}")
    ranks = args.ranks or _ranks(recipe)
    folder = args.folder or Path(f"{os.path.abspath(recipe.output_dir)}_drill")
    check(recipe.model_copy(update={"output_dir": str(folder / "run")}), ranks)
    rows = []
    for row in chain(not_provoked(), drill(recipe, ranks, folder, names, num_steps)):
        rows.append(row)
        _say(row, as_json=args.json)
    text = json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
    (folder / "drill.json").write_text(text + "\n")
    failed = sum(not row.passed for row in rows)
    if not args.json:
        _show(rows, folder, failed)
    if failed:
        sys.exit(ExitCode.UNFORESEEN)


def _names(args: argparse.Namespace) -> list[str]:
    """Return the names of the faults to provoke: those after `--only`, or all without `--only`.

    They are in the order of FAULTS. Raises InputError for an unknown name.
    """
    from mrl.drill import FAULTS

    wanted = args.only or list(FAULTS)
    if unknown := [name for name in wanted if name not in FAULTS]:
        raise InputError(f"--only: got {', '.join(unknown)}, expected some of {', '.join(FAULTS)}")
    return [name for name in FAULTS if name in wanted]


def _ranks(recipe: Recipe) -> int:
    """Return the number of ranks to start.

    This is the number of this machine's GPUs that the layout can use or, without GPUs, the smallest
    number of ranks that the layout allows. Raises InputError if there are too few GPUs.
    """
    import torch

    from mrl.preflight.ranks import fewest_ranks

    fewest, gpus = fewest_ranks(recipe), torch.cuda.device_count()
    if not gpus:
        return fewest
    if fewest > gpus:
        raise InputError(
            f"the recipe needs {fewest} ranks and this machine has {gpus} GPUs; a drill runs on one "
            "node: give a smaller layout, e.g. parallel.pipeline_model_parallel_size=1"
        )
    num_rollout = recipe.rollout.num_ranks or 0
    num_trainers = fewest - num_rollout
    return (gpus - num_rollout) // num_trainers * num_trainers + num_rollout


def _list(recipe: Recipe | None, names: list[str]) -> None:
    """Print a table of the faults `names`, and of the faults that a drill never provokes.

    The last column says `yes` if the fault is provoked, or else why not. Without a recipe it says
    `depends on the recipe` for a fault that some recipes do not allow.
    """
    from mrl.drill import FAULTS, NOT_PROVOKED, never
    from mrl.run import console

    rows = []
    for each in (FAULTS[name] for name in names):
        if recipe is None:
            whether = "yes" if each.why_not is never else "depends on the recipe"
        else:
            whether = each.why_not(recipe) or "yes"
        rows.append((each.name, each.did, whether))
    rows += [(name, "", why) for name, why in NOT_PROVOKED.items()]
    console.table("Faults", ("fault", "what is done", "provoked"), rows)


def _say(row: Row, *, as_json: bool) -> None:
    """Print the result of one fault, as a JSON object or as a line of text.

    As text, nothing is printed for a fault that was not provoked.
    """
    if as_json:
        print(json.dumps({**dataclasses.asdict(row), "passed": row.passed}), flush=True)
    elif row.verdict != "not provoked":
        state = row.verdict if row.passed else "FAILED"
        print(f"{row.fault}: {state} after {row.seconds:.1f} s", flush=True)


def _show(rows: list[Row], folder: Path, failed: int) -> None:
    from mrl.drill import HEADER, table_rows
    from mrl.run import console

    console.table("Faults", HEADER, table_rows(rows))
    print(f"logs and runs: {folder}")
    passed = sum(row.passed and row.verdict != "not provoked" for row in rows)
    print(f"{passed} passed, {failed} failed")
