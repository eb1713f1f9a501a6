"""This module runs the placement study: `make placement`.

The same tasks are trained with trainer and engines on the same cores, with an engine beside the trainer
that takes turns with it, and with engines that run freely under bounds 1, 2 and 4. Every role keeps to
a core of its own, and a colocated run gets both. A run that is done is a file of --work: a study that
was interrupted continues with the runs that are missing. Writes runs/results/placement.json;
of a smaller study, placement.json in --work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import between_markers, finish, summary, write_result
from mrl.drill.job import Unexpected
from studies.placement_study.arms import ARMS, KINDS, NUM_SEEDS, ROOT, Run, runs_of, settings
from studies.placement_study.plot import svg
from studies.placement_study.report import balance, checks, curves_of, rows_of
from studies.placement_study.runs import train
from studies.placement_study.tables import page_part

PAGE, PLOT = ROOT / "docs/placement.md", ROOT / "docs/placement.svg"
MARKER = "figures"
SKIPPED = 5
"""The first steps of a run, which no timing counts."""
SHORT_STEPS, SHORT_SKIPPED = 5, 2


def open_work(work: Path, *, fresh: bool) -> None:
    """Make the folder of the study. Exits where it holds a study of other settings."""
    if fresh:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    file, wanted = work / "settings.json", json.dumps(settings(), indent=1)
    if file.exists() and file.read_text() != wanted:
        sys.exit(f"error: {work} holds a study of other settings; give --fresh, or another --work")
    file.write_text(wanted)


def ensure_start(work: Path, kind: str) -> None:
    """Make the model that all runs of a task start from, where it is not there yet."""
    if (work / "start" / kind).exists():
        return
    (work / "start").mkdir(exist_ok=True)
    print(f"making the model that the runs of {kind!r} start from", flush=True)
    command = [sys.executable, "-W", "ignore", "-m", "studies.placement_study.start"]
    with (work / f"start_{kind}.log").open("w") as log:
        subprocess.run(
            [*command, str(work / "start"), kind], check=True, cwd=ROOT, stdout=log, stderr=log
        )


def result_file(work: Path, run: Run) -> Path:
    return work / f"{run.name}_{run.num_steps}.json"


def make(run: Run, work: Path) -> dict[str, Any]:
    """Train a run and keep its result; its folder goes, its log stays."""
    ensure_start(work, run.kind)
    scratch = work / "run"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        result = train(run, work / "start", scratch)
    finally:
        if (log := scratch / f"{run.name}.log").exists():
            log.replace(work / log.name)
        shutil.rmtree(scratch, ignore_errors=True)
    file = result_file(work, run)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.rename(file)
    return result


def line_of(result: dict[str, Any]) -> str:
    idle = ", ".join(
        f"{name.replace('_', ' ')} {result[name]:.0%}"
        for name in ("trainer_idle", "rollout_idle")
        if name in result
    )
    busy = " + ".join(f"{share:.2f}" for share in result["busy_cores"])
    return (
        f"{result['kind']} {result['arm']} seed {result['seed']}: {result['steps_per_s']:.3f} steps/s, "
        f"reward {result['reward_end']:.3f}, busy cores {busy}, {idle or 'takes turns'}, "
        f"{result['wall_s']:.0f} s in all"
    )


def run_all(wanted: Sequence[Run], work: Path, minutes: float | None) -> list[dict[str, Any]]:
    """Return the results of all runs, those on file among them; none is begun after `minutes`."""
    begin = time.monotonic()
    results = []
    for number, run in enumerate(wanted, start=1):
        if (file := result_file(work, run)).exists():
            results.append(json.loads(file.read_text()))
            continue
        passed = (time.monotonic() - begin) / 60
        if minutes is not None and passed >= minutes:
            continue
        try:
            results.append(make(run, work))
        except Unexpected as error:
            print(f"FAILED {run.name}: {error}".replace(str(work / "run"), str(work)), flush=True)
            continue
        passed = (time.monotonic() - begin) / 60
        print(f"[{number}/{len(wanted)} {passed:.1f} min] {line_of(results[-1])}", flush=True)
    return results


def write(
    results: Sequence[dict[str, Any]], num_wanted: int, folder: Path | None
) -> dict[str, bool]:
    """Write and print the result: a smaller study's into `folder`."""
    found, rows = checks(results, num_wanted), rows_of(results)
    content = {
        "balance": balance(results),
        "rows": rows,
        "verdicts": found,
        "curves": curves_of(results),
    }
    written = write_result(
        "placement",
        content,
        passed=sum(found.values()),
        failed=len(found) - sum(found.values()),
        packages=("torch", "megatron-core", "sglang"),
        path=folder / "placement.json" if folder else None,
    )
    print(f"\n{page_part(written)}\n")
    return found


def draw(result: dict[str, Any]) -> str:
    """Return the plot of placement.json."""
    num_samples = {
        row["kind"]: round(row["samples_per_s"][0] / row["steps_per_s"][0])
        for row in result["rows"]
    }
    return svg(result["curves"], num_samples)


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page and the plot that are made from placement.json."""
    text = between_markers(PAGE.read_text(), MARKER, page_part(result))
    return {PAGE: text, PLOT: draw(result)}


def main() -> None:
    """Make the runs that are missing, write what was found, and exit with 1 where a check failed."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--work", type=Path, default=ROOT / "runs/placement")
    parser.add_argument("--short", action="store_true", help="one seed and a few steps of each run")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs of --work")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the run, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work = options.work.absolute()
    open_work(work, fresh=options.fresh)
    wanted = runs_of(
        options.kinds,
        options.arms,
        1 if options.short else NUM_SEEDS,
        SHORT_STEPS if options.short else None,
        SHORT_SKIPPED if options.short else SKIPPED,
    )
    results = run_all(wanted, work, options.minutes)
    if not results:
        sys.exit("no run was made; 0 passed, 1 failed")
    if missing := len(wanted) - len(results):
        print(f"{missing} of {len(wanted)} runs are missing; the same command makes them")
    is_all = (options.kinds, options.arms) == (list(KINDS), list(ARMS)) and not options.short
    found = write(results, len(wanted), None if is_all and not missing else work)
    for text, holds in found.items():
        print(f"{'ok' if holds else 'FAILED'} {text}")
    finish(sum(found.values()), len(found) - sum(found.values()))


if __name__ == "__main__":
    main()
