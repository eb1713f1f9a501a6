"""This module compares a LoRA adapter with the training of all weights: `make lora`.

A toy model is trained with all of its weights to repeat some letter of the prompt. From this base the
demo, which asks for the first letter, is trained twice: all weights, and a LoRA adapter of attention
and experts with routing replay. Each arm first tries three learning rates with one seed, and is
compared at its best one with another seed: rewards, engine against trainer, and the bytes and seconds
of its weight syncs, which a larger model repeats. A pair of runs that is done is a file of --work: the
same command goes on where it was interrupted. Writes runs/results/lora.json; of
fewer steps, lora.json in --work.
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
from studies.lora_study.arms import NUM_STEPS, ROOT, SEED, Pair, large, pair, sweep
from studies.lora_study.plot import svg
from studies.lora_study.report import checks, chosen_rates, end, page_part
from studies.lora_study.runs import train

PAGE, PLOT = ROOT / "docs/lora.md", ROOT / "docs/lora.svg"
MARKER = "figures"


def ensure_start(work: Path) -> Path:
    """Return the folder of the models that runs start from; make it where it is not there yet."""
    folder = work / "start"
    if not (folder / "base").exists():
        print(
            "making the base: a toy model and 300 supervised steps of all its weights", flush=True
        )
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-W", "ignore", "-m", "studies.lora_study.start", str(folder)]
        with (work / "start.log").open("w") as log:
            subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=log)
    return folder


def made(runs: Pair, work: Path) -> list[dict[str, Any]]:
    """Return the results of a pair of runs: from its file, or by training. Folders go, logs stay."""
    file = work / f"{'+'.join(run.name for run in runs)}_{runs[0].num_steps}.json"
    if file.exists():
        return json.loads(file.read_text())
    scratch = work / "runs"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        results = train(runs, ensure_start(work), scratch)
    finally:
        for log in scratch.glob("*.log"):
            log.replace(work / log.name)
        shutil.rmtree(scratch, ignore_errors=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(results))
    part.rename(file)
    for result in results:
        print(line_of(result), flush=True)
    return results


def line_of(result: dict[str, Any]) -> str:
    return (
        f"{result['model']} {result['arm']} rate {result['rate']:g} seed {result['seed']}: reward "
        f"{result['rewards'][0]:.3f} to {end(result):.3f}, largest gap {max(result['gaps']):.1e}, "
        f"{result['wall_s']:.0f} s"
    )


def make_all(work: Path, num_steps: int) -> list[dict[str, Any]]:
    """Return the results of all runs: the rates that are tried, the comparison, the larger model."""
    results = [result for runs in sweep(num_steps) for result in made(runs, work)]
    rates = chosen_rates(results)
    print(f"chosen learning rates: {rates}", flush=True)
    for runs in (pair(SEED, num_steps, rates), large(num_steps)):
        results += made(runs, work)
    return results


def write(
    results: Sequence[dict[str, Any]], num_steps: int, folder: Path | None
) -> dict[str, bool]:
    """Write and print the result: that of fewer steps into `folder`."""
    found = checks(results, num_steps)
    written = write_result(
        "lora",
        {"num_steps": num_steps, "verdicts": found, "runs": results},
        passed=sum(found.values()),
        failed=len(found) - sum(found.values()),
        packages=("torch", "megatron-core", "sglang"),
        path=folder / "lora.json" if folder else None,
    )
    print(f"\n{page_part(written)}\n")
    return found


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page and the plot that are made from lora.json."""
    text = between_markers(PAGE.read_text(), MARKER, page_part(result))
    return {PAGE: text, PLOT: svg(result["runs"])}


def main() -> None:
    """Make the runs that are missing, write what was found, and exit with 1 where a check failed."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps of each run")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/lora")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs of --work")
    options = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # ends the runs, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin, work = time.monotonic(), options.work.absolute()
    if options.fresh:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    try:
        results = make_all(work, options.steps)
    except Unexpected as error:
        print(f"FAILED {error}".replace(str(work / "runs"), str(work)))
        finish(0, 1)
    found = write(results, options.steps, None if options.steps >= NUM_STEPS else work)
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes in all")
    for text, holds in found.items():
        print(f"{'ok' if holds else 'FAILED'} {text}")
    finish(sum(found.values()), len(found) - sum(found.values()))


if __name__ == "__main__":
    main()
