"""This module measures what quantised engines cost: `python -m studies.quantization [--seeds N]`.

The toy MoE of the stability study with a float32 trainer, and a bfloat16 engine whose weights are in
one of FORMATS. For each format four CORRECTIONS (none, truncated importance sampling, routing
replay, both) with five seeds. The runs are those of `studies.stability`: they have the same start, and
the same rollouts are compared natively and along the engine's routes. A finished run is a line of
FOLDER/FORMAT/results.jsonl; a study that was interrupted continues where it was.

docs/quantization.md gets the table. The last line counts what must hold: every run ended, and replay
lowers k3 of the same rollouts in every format.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import between_markers, finish, summary, write_result
from mrl.config import load_recipe
from mrl.quantization import SCHEMES
from studies.stability import NUM_SEEDS, open_folder, run_all
from studies.stability_study.arms import CORRECTIONS, RECIPE, ROOT, Job
from studies.stability_study.report import FIGURES, Result

FORMATS = ("none", *SCHEMES)
SHOWN = ("native_k3", "replayed_k3", "disagreement", "mismatch_extreme", "reward_final")
"""The figures of the table (`studies.stability_study.report.FIGURES`)."""
DOCUMENT = ROOT / "docs/quantization.md"


def jobs(folder: Path, name: str, num_seeds: int, num_steps: int) -> list[Job]:
    """Return the jobs of one format, seed after seed."""
    more = (f"rollout.quantization={name}",)
    return [
        Job(
            arm,
            seed,
            num_steps,
            str(folder / "start"),
            str(folder / "runs" / f"{arm}_{seed}"),
            more,
        )
        for seed in range(num_seeds)
        for arm in CORRECTIONS
    ]


def run_format(folder: Path, name: str, num_seeds: int, num_steps: int) -> tuple[list[Result], int]:
    """Make the runs of a format that are missing. Return all its results, and how many runs failed."""
    results = open_folder(folder, num_steps, fresh=False)
    there = {(result["arm"], result["seed"]) for result in results}
    missing = [
        job for job in jobs(folder, name, num_seeds, num_steps) if (job.arm, job.seed) not in there
    ]
    start, failed = time.monotonic(), 0
    for job, result in run_all(folder, missing):
        where = f"{name} {job.arm} seed {job.seed}"
        if isinstance(result, str):
            failed += 1
            print(f"FAILED {where}: {result}", flush=True)
            continue
        results.append(result)
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        figures = ", ".join(f"{key} {FIGURES[key](result):.2g}" for key in SHOWN)
        print(f"[{(time.monotonic() - start) / 60:.1f} min] {where}: {figures}", flush=True)
    return results, failed


def rows_of(name: str, results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each correction: (median, smallest, largest) over seeds of each figure."""
    rows = []
    for arm in CORRECTIONS:
        own = [result for result in results if result["arm"] == arm]
        columns = {key: [FIGURES[key](result) for result in own] for key in SHOWN}
        spreads = {k: (statistics.median(v), min(v), max(v)) for k, v in columns.items() if v}
        rows.append({"quantization": name, "arm": arm, "num_runs": len(own), **spreads})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = (
        "| engine | correction | k3, trainer's own routes | k3, engine's routes "
        "| router disagreement | extreme tokens | final reward |"
    )
    lines = [header, "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [f"{m:.2g} ({a:.2g} to {b:.2g})" for m, a, b in (row[key] for key in SHOWN)]
        lines.append(f"| {row['quantization']} | {row['arm']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def checks(rows: Sequence[dict[str, Any]], num_failed: int) -> dict[str, bool]:
    """Return what must hold, in words, and whether it does."""
    found = {"every run ended": not num_failed}
    for name in dict.fromkeys(row["quantization"] for row in rows):
        own = [row for row in rows if row["quantization"] == name]
        found[f"{name}: replay lowers k3 of the same rollouts"] = all(
            row["replayed_k3"][0] < row["native_k3"][0] for row in own
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    whole = load_recipe(RECIPE).train.num_steps
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--steps", type=int, default=whole)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/quantization")
    arguments = parser.parse_args()
    folder, rows, num_failed = arguments.folder.absolute(), [], 0
    for name in arguments.formats:
        own = run_format(folder / name, name, arguments.seeds, arguments.steps)
        num_failed += own[1]
        if own[0]:
            rows += rows_of(name, own[0])
    if not rows or not all(row["num_runs"] for row in rows):
        sys.exit("a correction has no run; 0 passed, 1 failed")
    found = checks(rows, num_failed)
    is_whole = (arguments.seeds, arguments.steps) == (NUM_SEEDS, whole) and not num_failed
    is_whole &= set(arguments.formats) == set(FORMATS)
    write_result(
        "quantization",
        {
            "num_steps": arguments.steps,
            "num_seeds": arguments.seeds,
            "rows": rows,
            "verdicts": found,
        },
        passed=sum(found.values()),
        failed=len(found) - sum(found.values()),
        packages=("torch", "megatron-core", "sglang"),
        path=None if is_whole else folder / "quantization.json",
    )
    if is_whole:
        DOCUMENT.write_text(between_markers(DOCUMENT.read_text(), "study", table(rows)))
    print(f"\n{table(rows)}\n")
    for text, holds in found.items():
        print(f"{'ok' if holds else 'FAILED'} {text}")
    finish(sum(found.values()), len(found) - sum(found.values()))


if __name__ == "__main__":
    main()
