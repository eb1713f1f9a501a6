"""`mrl diff RUN_A RUN_B` shows where two runs begin to differ."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.run.compare import Pair

MAX_ROWS = 20


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "diff",
        help="show where two runs begin to differ: recipe, data, samples, metrics",
        description="Compare two runs: recipe, versions, prompts, samples and metrics, and the first "
        "step in which they differ.",
    )
    command.add_argument("a", type=Path, metavar="RUN_A", help="output_dir of a run")
    command.add_argument("b", type=Path, metavar="RUN_B", help="output_dir of the other run")
    command.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    command.set_defaults(run=run, only_reads=True)


def run(args: argparse.Namespace) -> None:
    from mrl.run.compare import compare_runs

    found = compare_runs(args.a, args.b)
    if args.json:
        print(json.dumps(found.as_json(), allow_nan=False))
        return
    _show("Recipe", found.config)
    _show("Versions", found.versions)
    for name in ("prompts", "samples", "metrics"):
        parting = getattr(found, name)
        if parting is not None:
            _show(f"{name.capitalize()}: first in step {parting.step}", parting.pairs)
    if found.steps_a != found.steps_b:
        print(f"steps: {found.steps_a} and {found.steps_b}")
    print(found.verdict())


def _show(title: str, pairs: list[Pair]) -> None:
    from mrl.run import console

    if not pairs:
        return
    rows = [
        (p.key, _cell(p.a), _cell(p.b), "" if p.difference is None else f"{p.difference:.2g}")
        for p in pairs[:MAX_ROWS]
    ]
    if len(pairs) > MAX_ROWS:
        rows.append((f"and {len(pairs) - MAX_ROWS} more", "", "", ""))
    console.table(title, ("", "RUN_A", "RUN_B", "relative"), rows)


def _cell(value: Any) -> str:
    text = "-" if value is None else f"{value}"
    return text if len(text) <= 60 else f"{text[:57]}..."
