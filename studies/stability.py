"""This module runs the MoE stability study: `python -m studies.stability [--seeds N] [--steps N]`.

A toy MoE is trained with a bfloat16 engine, a float32 trainer, and several optimizer steps a rollout
(launch/recipes/stability.yaml): six corrections (runs.ARMS) with five seeds each, all from one
SFT model. Two processes, one a core, each with a real SGLang that its runs use one after the
other. A finished run is a line of FOLDER/results.jsonl: a study that was interrupted goes on where it
was, `--fresh` begins anew. docs/stability.md gets the tables, docs/stability.svg the curves; of a study
with other seeds or steps, files of these names in FOLDER do.

The last line counts what must hold (report.checks). What the R3 paper reports is printed beside what
was seen, and fails nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import NEW, between_markers, finish, summary, write_result
from mrl.config import load_recipe
from studies.stability_study.arms import ARMS, RECIPE, ROOT, SHAPE, Job
from studies.stability_study.jobs import make_missing, open_results
from studies.stability_study.plot import svg
from studies.stability_study.report import (
    checks,
    expectation_table,
    expectations,
    row_of,
    smoothed,
    table,
)

DOCUMENT, PLOT = ROOT / "docs/stability.md", ROOT / "docs/stability.svg"
NUM_SEEDS = 5


def settings_of(num_steps: int) -> dict[str, Any]:
    """Return what results must have in common to stand in one table."""
    return {"recipe": RECIPE.read_text(), "arms": ARMS, "shape": SHAPE, "num_steps": num_steps}


def open_folder(folder: Path, num_steps: int, *, fresh: bool) -> list[dict[str, Any]]:
    """Return the results that are on file for the same settings; make the model that runs start
    from.
    """
    results = open_results(folder, settings_of(num_steps), fresh=fresh)
    if not (folder / "start").exists():
        print("making the start: a toy model and its supervised steps", flush=True)
        command = [sys.executable, "-W", "ignore", "-m", "studies.stability_study.start"]
        with (folder / "start.log").open("w") as log:
            subprocess.run([*command, folder], check=True, cwd=ROOT, stdout=log, stderr=log)
    return results


def jobs(folder: Path, num_seeds: int, num_steps: int) -> list[Job]:
    """Return all jobs, seed after seed: what was made before an interruption has all arms."""
    return [
        Job(
            arm,
            seed,
            num_steps,
            str(folder / "start"),
            str(folder / "runs" / f"{arm}_{seed}"),
            tuple(ARMS[arm]),
        )
        for seed in range(num_seeds)
        for arm in ARMS
    ]


def line_of(result: dict[str, Any]) -> str:
    curve = smoothed(result) or [float("nan")]
    paired = [step["paired"] for step in result["steps"]]
    k3 = [sum(p[way]["k3"] for p in paired) / max(len(paired), 1) for way in ("native", "replayed")]
    return (
        f"{result['arm']:8} seed {result['seed']}: reward {curve[0]:.2f} to {curve[-1]:.2f} (best "
        f"{max(curve):.2f}), k3 {k3[0]:.1e} native, {k3[1]:.1e} replayed, {result['seconds']:.0f} s, "
        f"{result['ended']}"
    )


def write(
    results: list[dict[str, Any]], num_wanted: int, num_steps: int, folder: Path | None
) -> dict[str, bool]:
    """Write the result and the plot: into runs/results/, or a smaller study's into `folder`."""
    rows = [row_of(arm, own) for arm in ARMS if (own := [r for r in results if r["arm"] == arm])]
    expected, found = expectations(results), checks(results, num_wanted)
    content = {
        "num_steps": num_steps,
        "rows": rows,
        "expectations": expected,
        "verdicts": found,
    }
    write_result(
        "stability",
        content,
        passed=sum(found.values()),
        failed=len(found) - sum(found.values()),
        packages=("torch", "megatron-core", "sglang"),
        path=folder / "stability.json" if folder else None,
    )
    (folder or NEW).joinpath(PLOT.name).write_text(svg(results))
    print(f"\n{table(rows)}\n\n{expectation_table(expected)}\n")
    return found


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page with the tables of stability.json, and the plot of the runs behind it."""
    text = between_markers(DOCUMENT.read_text(), "arms", table(result["rows"]))
    text = between_markers(text, "expected", expectation_table(result["expectations"]))
    return {DOCUMENT: text, PLOT: (NEW / PLOT.name).read_text()}


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    whole = (NUM_SEEDS, load_recipe(RECIPE).train.num_steps)
    parser.add_argument("--seeds", type=int, default=whole[0])
    parser.add_argument("--steps", type=int, default=whole[1])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/stability")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results of the folder")
    arguments = parser.parse_args()
    folder, num_steps = arguments.folder.absolute(), arguments.steps
    results = open_folder(folder, num_steps, fresh=arguments.fresh)
    every = jobs(folder, arguments.seeds, num_steps)
    there = {(result["arm"], result["seed"]) for result in results}
    missing = [job for job in every if (job.arm, job.seed) not in there]
    failed = make_missing(folder, results, missing, line_of)
    if not results:
        sys.exit("no run was made; 0 passed, 1 failed")
    is_whole = (arguments.seeds, num_steps) == whole and not failed
    found = write(results, len(every), num_steps, None if is_whole else folder)
    for text, holds in found.items():
        print(f"{'ok' if holds else 'FAILED'} {text}")
    finish(sum(found.values()), len(found) - sum(found.values()))


if __name__ == "__main__":
    main()
