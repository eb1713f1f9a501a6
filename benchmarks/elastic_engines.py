"""This module trains while engines are added and removed at random:
`python -m benchmarks.elastic_engines`.

Each case trains a toy for 100 steps with one engine, and again while engines are added and removed,
at most three at a time. In the middle the second run is killed (SIGKILL for its launcher), and
continues from its checkpoint with another number of engines. Both must end with the same weights
and optimizer state, and have the same samples and the same metrics in each step. Cases that are
done are on file in --work, and the same command continues after an interruption."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.elastic_runs import (
    RandomChanges,
    command,
    differences,
    engines_by_step,
    finish,
    kill_launcher,
    num_compared,
    start,
)
from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import between_markers, summary, write_result
from benchmarks.evidence.result import finish as finish_command
from mrl.drill.job import Unexpected, num_rows
from mrl.toy_model import write_toy_model

AHEAD = ("async.deterministic=true", "algorithm.importance=tis")
CASES: dict[str, tuple[tuple[str, ...], bool]] = {
    "synchronous": ((), True),
    "fixed, 1 ahead": ((*AHEAD, "async.max_staleness=1"), True),
    "fixed, 2 ahead": ((*AHEAD, "async.max_staleness=2"), False),
}
"""For each case the keys of the recipe, and whether engines are also removed with `--now`, which keeps
the bits up to one step ahead."""
DOCUMENT = ROOT / "docs/engines.md"
NUM_STEPS = 100
MOST = 3
PACE_S = 1.0


def train(case: str, steps: int, pace_s: float, seed: int, work: Path) -> dict[str, Any]:
    """Return the row of a case: from its file in `work`, or by its two runs of `steps` steps."""
    name = case.replace(", ", "_").replace(" ", "_")
    file = work / f"{name}_{steps}.json"
    if file.exists():
        return json.loads(file.read_text())
    model = work / "model"
    if not model.exists():
        write_toy_model(model)
    save_every = min(20, steps // 4)
    keys = (*CASES[case][0], f"train.num_steps={steps}", f"checkpoint.save_every={save_every}")
    calm, run = work / f"{name}_calm", work / f"{name}_elastic"
    for each in (calm, run):
        shutil.rmtree(each, ignore_errors=True)
    finish(start(command(model, calm, 1, keys), calm, 0.0))
    begin = time.time()
    changes = RandomChanges(run, seed, MOST, CASES[case][1])
    try:
        job = start(command(model, run, 1, keys), run, pace_s)
        try:
            job.wait_for_rows(steps // 2 + 1)
            kill_launcher(job)
        finally:
            job.kill()
        killed_after = num_rows(run)
        resumed = command(model, run, 2, keys)
        finish(start([*resumed, "--allow", "rollout.num_ranks"], run, pace_s))
    finally:
        changes.stop()
    numbers = engines_by_step(run)
    row = {
        "case": case,
        "steps": steps,
        "commands": changes.counts(),
        "changes": [asdict(each) for each in changes.changes],
        "killed_after": killed_after,
        "engines": {str(n): numbers.count(n) for n in sorted(set(numbers))},
        "steps_with_a_change": sum(a != b for a, b in itertools.pairwise(numbers)),
        "metrics_compared": num_compared(run),
        "seconds": round(time.time() - begin),
        "differences": differences(run, calm, steps),
    }
    file.write_text(json.dumps(row))
    return row


def is_good(row: dict[str, Any]) -> bool:
    """Return whether nothing differs, and engines were really added and removed."""
    commands, numbers = row["commands"], row["engines"]
    came_and_went = commands["add"] >= 3 and commands["remove"] >= 2 and len(numbers) >= 2
    has_now = commands["remove --now"] >= 1 or not CASES[row["case"]][1]
    return not row["differences"] and came_and_went and has_now and row["steps_with_a_change"] >= 4


def described(row: dict[str, Any]) -> str:
    """Describe the row of a case in one line."""
    commands = ", ".join(f"{number} {name}" for name, number in row["commands"].items())
    numbers = ", ".join(f"{n} engines in {count}" for n, count in row["engines"].items())
    ended = "; ".join(row["differences"][:3]) or "the same bits"
    return f"{row['case']}: {row['steps']} steps, {commands}; {numbers} steps; {ended}"


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page with the table of the result."""
    del name
    lines = [
        "| case | steps | added | removed | removed with `--now` | killed after step | differs |",
        "|---" * 7 + "|",
    ]
    for row in result["cases"]:
        counts = (row["commands"][key] for key in ("add", "remove", "remove --now"))
        ended = "; ".join(row["differences"]) or "nothing"
        cells = (row["case"], row["steps"], *counts, row["killed_after"], ended)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return {DOCUMENT: between_markers(DOCUMENT.read_text(), "elastic", "\n".join(lines))}


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps of each run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--pace", type=float, default=PACE_S, help="seconds of a group's reward")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "elastic")
    parser.add_argument("--out", type=Path, help="where the result goes")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the runs
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(args.cases):
        try:
            row = train(case, args.steps, args.pace, args.seed + number, args.work)
        except Unexpected as error:
            print(f"{case}: {error}")
            sys.exit(1)
        rows.append(row)
        print(described(row), flush=True)
    good = sum(map(is_good, rows))
    is_whole = (args.steps, args.cases) == (NUM_STEPS, list(CASES))
    write_result(
        "elastic", {"cases": rows}, passed=good, failed=len(rows) - good,
        packages=("torch", "megatron-core", "sglang"),
        path=args.out or (None if is_whole else args.work / "elastic.json"),
    )  # fmt: skip
    finish_command(good, len(rows) - good)


if __name__ == "__main__":
    main()
