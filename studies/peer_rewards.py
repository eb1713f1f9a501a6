"""This module compares the rewards that mrl and TRL reach on the pretrained model, over several seeds.

    make smollm BENCH_ARGS="--only dense"     # makes the model and the prompts
    make .venv/.peers                        # installs TRL
    python -m studies.peer_rewards --seeds 3

Each run is the part "SmolLM2" of `make peers`: 24 steps of 64 answers. A run that is on file is not
repeated, so the command continues where it stopped. TRL makes four backward passes a step, which gives
the same gradient with a quarter of the memory; seconds are not compared here.

The final reward of a run is the mean of its last 5 steps (320 answers). The sides agree if the
difference of their means over the seeds is at most twice its standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import finish, summary, write_result
from benchmarks.peer_runs.run import Work
from benchmarks.peers import LAST, PACKAGES, Side, parts, sides

FOLDER = ROOT / "runs" / "peer_rewards"
ACCUMULATION = 4
NUM_ERRORS = 2.0
"""Standard errors of the difference within which the sides agree."""


def rewards_of(side: str, run: Side, work: Work, folder: Path) -> list[float]:
    """Return the mean reward of each step of a run, from its file if there is one."""
    path = folder / f"{side}_{work.seed}.json"
    if not path.is_file():
        rewards = run(work).rewards
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(rewards))
        partial.rename(path)
    return json.loads(path.read_text())


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the difference of two means, and its standard error (Welch)."""
    variance = sum(statistics.variance(each) / len(each) for each in (ours, theirs))
    return statistics.fmean(ours) - statistics.fmean(theirs), variance**0.5


def main() -> None:
    """Run what is missing, print the table and write runs/results/peer_rewards.json."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="folder with TRL")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="finished runs")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds: got {options.seeds}, expected at least 2 for a standard error")
    options.folder.mkdir(parents=True, exist_ok=True)
    part = next(each for each in parts("", "", quick=False) if each.name == "SmolLM2")
    if not Path(part.work.model, "config.json").is_file():
        parser.error(f'no model in {part.work.model}; run `make smollm BENCH_ARGS="--only dense"`')
    curves: dict[str, list[list[float]]] = {}
    for seed in range(options.seeds):
        work = replace(part.work, seed=seed, accumulation=ACCUMULATION)
        for side, run in sides(part, None, options.packages).items():
            curves.setdefault(side, []).append(rewards_of(side, run, work, options.folder))
            print(f"{side}, seed {seed}: {curves[side][-1][-1]:.3f}", flush=True)
    final = {side: [statistics.fmean(c[-LAST:]) for c in each] for side, each in curves.items()}
    gap, error = difference(final["mrl"], final["trl"])
    table = Table(title=f"mean reward of the last {LAST} steps", title_justify="left")
    for column in ("side", *(f"seed {n}" for n in range(options.seeds)), "mean"):
        table.add_column(column)
    for side, each in final.items():
        table.add_row(side, *(f"{x:.3f}" for x in each), f"{statistics.fmean(each):.3f}")
    Console(width=120).print(table)
    agrees = abs(gap) <= NUM_ERRORS * error
    print(f"mrl - trl: {gap:+.3f}, standard error {error:.3f}: {'agree' if agrees else 'differ'}")
    content = {"curves": curves, "final": final, "difference": gap, "standard_error": error}
    packages = ("torch", "transformers", "sglang", "megatron-core")
    write_result("peer_rewards", content, passed=int(agrees), failed=int(not agrees),
                 packages=packages)  # fmt: skip
    finish(int(agrees), int(not agrees))


if __name__ == "__main__":
    main()
