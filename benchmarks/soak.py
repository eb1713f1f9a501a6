"""This module trains the demo with a fault every 20 steps, beside the demo without: `make soak`.

Checked: the reward and every other metric are those without a fault, bit for bit; the memory of
trainer and engine is flat over the steps without a fault; every fault ends as it should. Reported: the
wall-time efficiency (ETTR), the seconds of the steps that count over all seconds of the run.
Writes runs/results/soak.json.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import finish, summary, write_result
from benchmarks.fault_table.base import DATA, RECIPE
from benchmarks.fault_table.strikes import VICTIMS, left_of, outcome, strike
from mrl.config import load_recipe
from mrl.drill import Drill
from mrl.drill.job import num_rows
from mrl.run.folder import RunFolder
from mrl.toy_model import write_toy_model

NUM_STEPS, EVERY = 500, 20
"""Steps of a whole run, and of which each has a fault; others are not written to the results."""
LAST_STEPS_S = 3600.0
"""Seconds for the steps after the last fault."""
MEMORY = ("memory/trainer_rss_bytes", "memory/engine_rss_bytes")
MAX_GROWTH = 1.1
"""The largest memory of the last tenth of the steps over that of the second tenth."""


def growth(rows: list[dict[str, Any]], key: str) -> float:
    """Return the memory of the last tenth of the steps over that of the second, as medians."""
    tenth = max(1, len(rows) // 10)
    early, late = rows[tenth : 2 * tenth], rows[-tenth:]
    return statistics.median(r[key] for r in late) / statistics.median(r[key] for r in early)


def struck(drill: Drill, every: int, seed: int) -> tuple[list[str], list[str]]:
    """Train all steps, with a fault after each `every`; return (victims, what went wrong)."""
    chance = random.Random(seed)
    victims: list[str] = []
    problems: list[str] = []
    drill.job = drill.start()
    for step in range(every, drill.num_steps, every):
        job = drill.job
        job.wait_for_rows(step)
        time.sleep(chance.uniform(0, RunFolder(drill.run).read_metrics()[-1]["time/step_s"]))
        victims.append(chance.choice(VICTIMS))
        strike(victims[-1], job)
        code = outcome(drill, victims[-1], job)
        print(f"step {step}: kill -9 {victims[-1]}, exit code {code}", flush=True)
        if code is not None:
            found, files = left_of(victims[-1], job)
            problems += found + drill.continued(num_rows(drill.run))
            problems += [f"the next start left {file}" for file in files if file.exists()]
    if code := drill.job.end(LAST_STEPS_S):
        problems.append(f"the run ended with code {code}")
    return victims, problems


def main() -> None:
    """Train twice, compare, print and write the figures, and exit with 1 where a check failed."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--every", type=int, default=EVERY, help="steps between faults")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="mrl-soak-") as folder:
        model = Path(folder) / "model"
        write_toy_model(model)
        given = [f"model.path={model}", f"data.path={DATA}", f"output_dir={folder}/out"]
        drill = Drill(load_recipe(RECIPE, given), 1, Path(folder) / "soak", options.steps)
        try:
            began = time.monotonic()
            drill.train_without_fault()
            calm_s = time.monotonic() - began
            began = time.monotonic()
            victims, problems = struck(drill, options.every, options.seed)
            wall_s = time.monotonic() - began
            problems += drill.differences()
            rows = RunFolder(drill.run).read_metrics()
            calm = RunFolder(drill.reference).read_metrics()
        finally:
            drill.end()
    growths = {key: round(growth(calm, key), 3) for key in MEMORY}
    problems += [f"{key} grew by {g}" for key, g in growths.items() if g > MAX_GROWTH]
    if len(rows) != options.steps:
        problems.append(f"{len(rows)} steps of {options.steps} are in metrics.jsonl")
    last = max(1, options.steps // 10)
    content = {
        "steps": options.steps,
        "faults": victims,
        "reward": round(statistics.mean(row["reward/mean"] for row in rows[-last:]), 4),
        "reward_without_faults": round(statistics.mean(r["reward/mean"] for r in calm[-last:]), 4),
        "memory_growth": growths,
        "seconds": round(wall_s, 1),
        "seconds_without_faults": round(calm_s, 1),
        "ettr": round(sum(row["time/step_s"] for row in rows) / wall_s, 3),
        "failures": problems,
    }
    print(content)
    failed = len(problems)
    passed = len(victims) if not failed else 0
    if (options.steps, options.every) == (NUM_STEPS, EVERY):
        packages = ("torch", "sglang", "megatron-core")
        write_result("soak", content, passed=passed, failed=failed, packages=packages)
    finish(passed, failed)


if __name__ == "__main__":
    main()
