"""`mrl branch RUN[@STEP] NEW_DIR [key=value ...]` makes a run from a checkpoint of another run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "branch",
        help="make a new run from a checkpoint of another, with other settings",
        description="Make a run folder that continues from a checkpoint of another run, with its "
        "optimizer state, its position in the data and its KL coefficient, and with the given keys "
        "changed. Then `mrl train NEW_DIR` trains it. RUN is not changed.",
    )
    command.add_argument(
        "source",
        metavar="RUN[@STEP]",
        help="the folder of a run, and the step of a checkpoint; by default the newest",
    )
    command.add_argument("folder", type=Path, metavar="NEW_DIR", help="a new or empty folder")
    command.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="the keys that the new run changes",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from mrl.commands.branch_run import branch

    made = branch(args.source, args.folder, args.overrides)
    for change in made.changes:
        print(f"{change.key}: {change.old!r} -> {change.new!r}")
    print(f"made {args.folder} from step {made.step} of {made.parent}")
    print(f"next: mrl train {args.folder}")
