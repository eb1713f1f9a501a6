"""`mrl replay RUN STEP` trains one step again, also under torchrun with the run's layout."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.commands.replay_step import Replayed


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "replay",
        help="train one step of a run again and compare its metrics",
        description="Train one step of a run again from its saved rollouts (debug.save_rollouts) and "
        "compare the metrics bit by bit. The run is not changed. Exit code 1: a metric differs.",
    )
    command.add_argument("run_folder", type=Path, metavar="RUN", help="output_dir of a run")
    command.add_argument(
        "step",
        type=int,
        metavar="STEP",
        help="the step to repeat, counted from 0 as in metrics.jsonl",
    )
    command.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder to write to; by default RUN/replay/step_STEP",
    )
    command.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    command.set_defaults(run=run, after_interrupt="the run itself is untouched")


def run(args: argparse.Namespace) -> None:
    """Replay the step, and exit with 1 if a metric differs."""
    from mrl.commands.replay_step import check_replay_folder, find_source, replay

    source = find_source(args.run_folder, args.step)
    from parallel.mesh import destroy_mesh, world_size

    output = args.output or args.run_folder / "replay" / f"step_{args.step:06d}"
    check_replay_folder(source, output)
    done = replay(source, output, world_size())
    if os.environ.get("RANK", "0") == "0":
        _show_json(done) if args.json else _show(done)
    destroy_mesh()
    if done.pairs:
        sys.exit(1)


def _show_json(done: Replayed) -> None:
    content = {
        "step": done.source.step,
        "from": done.source.name,
        "output": str(done.folder.root),
        "num_metrics": done.num_keys,
        "bitwise_equal": not done.pairs,
        "differences": {pair.key: [pair.a, pair.b] for pair in done.pairs},
        "not_measured_again": done.missing,
    }
    print(json.dumps(content))


def _show(done: Replayed) -> None:
    from mrl.run import console

    source = done.source
    rows = [
        (pair.key, f"{pair.a!r}", f"{pair.b!r}", _percent(pair.difference)) for pair in done.pairs
    ]
    if rows:
        header = ("metric", "on file", "again", "difference")
        console.table(f"Step {source.step} again, from {source.name}", header, rows)
    if done.missing:
        print(f"not measured again: {', '.join(done.missing)}")
    verdict = f"{len(rows)} of {done.num_keys} metrics differ" if rows else (
        f"bitwise equal in all {done.num_keys} metrics"
    )  # fmt: skip
    print(f"step {source.step} again, from {source.name}: {verdict}")
    if done.folder.token_file(source.step).is_file():
        print(f"next: mrl why {done.folder.root} {source.step}")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2g}"
