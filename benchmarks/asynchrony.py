"""This module runs engines freely and strikes them: `make async`.

First the demo trains with each bound on the staleness; every token of every record in tokens/ must be
within it, and the reward must reach 0.8. Then a shorter run with bound 2 loses engines (`kill -9`) and
workers (`kill -9`), and has workers stop (SIGSTOP), at random moments: every prompt that was drawn must
be trained on once, or be in flight at the end, and no process, port or file may be left. Then an
engine comes late, and others are wrong about their weights (`async_cases.py`). What each part has
found is kept in runs/async, so that a second call goes on. Writes runs/results/asynchrony.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.async_cases import PLANTED, late, planted, workers_of
from benchmarks.evidence.catalog import target_of
from benchmarks.evidence.result import finish, provenance, summary, write_result
from benchmarks.fault_table.base import DATA, RECIPE
from mrl.config import load_recipe
from mrl.data.cursor import PromptCursor
from mrl.diagnosis.tokens import load_tokens
from mrl.drill.job import Job, Unexpected, kill, num_rows
from mrl.preflight import check
from mrl.run.folder import RunFolder
from mrl.toy_model import write_toy_model

BOUNDS, NUM_STEPS = (1, 2, 4), 200
STRIKES = {"engine": 20, "worker": 10, "hang": 5}
"""Strikes of a whole run, by what they strike."""
BETWEEN = 3
"""Steps from one strike to the next."""
PROMPTS, SAMPLES = 4, 4
"""The sizes of the run that is struck."""
REWARD, LEARNED_AFTER = 0.8, 70
"""What the demo must reach, over its last tenth, after this many steps."""
LIMIT_S = 300.0
LATE = "late"
CASES = (LATE, *PLANTED)


def overrides(folder: Path, output: Path, bound: int, steps: int) -> list[str]:
    """Return the recipe's changes: two ranks, one of which generates."""
    return [
        f"model.path={folder / 'model'}", f"data.path={DATA}", f"output_dir={output}",
        "algorithm.importance=tis", "rollout.placement=disaggregated", "rollout.num_ranks=1",
        f"async.max_staleness={bound}", "async.worker_timeout_s=10", f"train.num_steps={steps}",
        "checkpoint.save_every=0", "diagnosis.save_tokens_every=1",
    ]  # fmt: skip


def smaller() -> list[str]:
    """Return the changes that make a step of the demo small, with answers of several lengths."""
    return [
        f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}",
        "rollout.max_response_len=12", "rollout.min_response_len=0",
    ]  # fmt: skip


def start(folder: Path, output: Path, *keys: str, ranks: int = 2) -> Job:
    """Start a run; the last `rollout.num_ranks` of its ranks generate."""
    launcher = ["-m", "mrl.launch", "--standalone", f"--nproc-per-node={ranks}"]
    scratch = output.with_suffix(".tmp")
    scratch.mkdir()
    command = [sys.executable, *launcher, "-m", "mrl", "train", str(RECIPE), *keys]
    return Job(command, output, output.with_suffix(".log"), scratch, LIMIT_S)


def ages(run: Path) -> Counter[int]:
    """Return how many loss tokens of a run were how many versions old when they were trained."""
    found: Counter[int] = Counter()
    for file in sorted((run / "tokens").glob("*.safetensors")):
        record = load_tokens(file)
        versions = record.weight_versions[record.loss_mask]
        found.update((record.version - versions).tolist())
    return found


def try_bound(folder: Path, bound: int, steps: int) -> dict[str, Any]:
    """Train freely with one bound; return what the tokens show."""
    run = folder / f"bound_{bound}"
    job = start(folder, run, *overrides(folder, run, bound, steps))
    try:
        code = job.end(LIMIT_S * 12)
    finally:
        left = job.left()
        job.kill()
    histogram = ages(run)
    rows = RunFolder(run).read_metrics()
    problems = [] if code == 0 and len(rows) == steps else [f"code {code}, {len(rows)} steps"]
    if beyond := [age for age in histogram if not 0 <= age <= bound]:
        problems.append(f"tokens are {sorted(beyond)} versions old")
    if any(row["routing/captured_coverage"] != 1.0 for row in rows):
        problems.append("the coverage of the replay is below 1")
    last = [row["reward/mean"] for row in rows[-max(1, steps // 10) :]]
    reward = statistics.mean(last) if last else 0.0
    if steps >= LEARNED_AFTER and reward < REWARD:
        problems.append(f"the reward is {reward:.3f}, below {REWARD}")
    return {
        "bound": bound,
        "reward": round(reward, 4),
        "tokens_by_age": {str(age): histogram[age] for age in sorted(histogram)},
        "problems": problems + left,
    }


def worker_of(job: Job) -> psutil.Process:
    """Return the worker of the run's rollout rank, once it is there."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = workers_of(job)
        return bool(found)

    job.wait(is_there, "a worker ran")
    return found[0]


def strike(job: Job, victim: str) -> None:
    """Strike the engine, or the worker."""
    worker = worker_of(job)
    if victim == "engine":
        kill(job.engines())
    else:
        worker.send_signal(signal.SIGKILL if victim == "worker" else signal.SIGSTOP)


def struck(folder: Path, strikes: dict[str, int], seed: int) -> dict[str, Any]:
    """Train freely under strikes; return what came of it."""
    chance = random.Random(seed)
    victims = [victim for victim, count in strikes.items() for _ in range(count)]
    chance.shuffle(victims)
    steps = BETWEEN * (len(victims) + 2)
    run = folder / "struck"
    keys = [*overrides(folder, run, 2, steps), *smaller(), "async.max_worker_restarts=100"]
    job = start(folder, run, *keys)
    problems: list[str] = []
    try:
        for number, victim in enumerate(victims):
            job.wait(lambda at=BETWEEN * (number + 1): num_rows(run) >= at, f"strike {number}")
            job.look(closely=True)
            time.sleep(chance.uniform(0, 1))
            print(f"step {num_rows(run)}: {victim}", flush=True)
            strike(job, victim)
        if code := job.end(LIMIT_S * 4):
            problems.append(f"the run ended with code {code}")
    except Unexpected as error:
        problems.append(str(error))
    finally:
        problems += job.left()
        job.kill()
    return {"strikes": victims, "steps": steps, "problems": problems + lost(folder, keys, run)}


def lost(folder: Path, keys: list[str], run: Path) -> list[str]:
    """Return the prompts that were trained on twice, or were lost: drawn, and nowhere at the end."""
    rows = RunFolder(run).read_metrics()
    trained = [
        line["prompt_id"]
        for row in rows
        for line in RunFolder(run).read_rollouts(int(row["step"]))[::SAMPLES]
    ]
    twice = [prompt for prompt, count in Counter(trained).items() if count > 1]
    recipe = load_recipe(RECIPE, [*keys, f"output_dir={folder / 'unused'}"])
    sources = check(recipe, 2).sources
    cursor = PromptCursor(sources, seed=recipe.seed, shuffle=recipe.data.shuffle)
    order = [prompt.prompt_id for prompt in cursor.next(len(trained) * 2)]
    drawn = order[: 1 + max(order.index(prompt) for prompt in trained)]
    missing = set(drawn) - set(trained)
    last = rows[-1]
    flying = sum(
        last[f"async/{key}"] for key in ("waiting_prompts", "leased_groups", "queued_groups")
    )
    dropped = sum(value for key, value in last.items() if key.startswith("async/dropped/"))
    found = [f"prompts {twice} were trained on twice"] if twice else []
    if len(missing) > flying + dropped:
        found.append(f"{len(missing)} prompts were not trained on, {flying:g} are in flight")
    return found


def try_case(folder: Path, case: str) -> dict[str, Any]:
    """Run one of `CASES`; return what came of it."""
    keys = [*overrides(folder, folder / "unused", 2, NUM_STEPS), *smaller()]
    return late(start, folder, keys) if case == LATE else planted(start, folder, keys, case)


def main() -> None:
    """Run what is asked for, write the result of a whole run, and exit with 1 where a check failed."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--bounds", type=int, nargs="*", default=list(BOUNDS))
    parser.add_argument("--strikes", type=json.loads, default=STRIKES, help='{"engine": 2}')
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/async"), help="is continued")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the run, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wanted: dict[str, Callable[[Path], dict[str, Any]]] = {
        f"bound_{bound}_steps_{options.steps}": partial(try_bound, bound=bound, steps=options.steps)
        for bound in options.bounds
    }
    if options.strikes:
        name = "_".join(f"{victim}_{count}" for victim, count in options.strikes.items())
        wanted[f"struck_{name}_seed_{options.seed}"] = partial(
            struck, strikes=options.strikes, seed=options.seed
        )
    wanted |= {case: partial(try_case, case=case) for case in options.cases}
    commit = provenance(target_of("asynchrony").measures)["commit"]
    found = {
        name: part_of(options.folder / f"{name}.json", part, commit)
        for name, part in wanted.items()
    }
    failed = sum(bool(part["problems"]) for part in found.values())
    whole = (NUM_STEPS, list(BOUNDS), STRIKES, list(CASES))
    if (options.steps, options.bounds, options.strikes, options.cases) == whole:
        packages = ("torch", "sglang", "megatron-core")
        write_result(
            "asynchrony", found, passed=len(found) - failed, failed=failed, packages=packages
        )
    finish(len(found) - failed, failed)


def part_of(file: Path, run: Callable[[Path], dict[str, Any]], commit: str) -> dict[str, Any]:
    """Return what a part has found, from an earlier call where `file` has it."""
    if file.exists():
        found = json.loads(file.read_text())
        print(
            f"{file} is of an earlier call, at {found['commit'][:7]}; remove it to repeat the part"
        )
        return found
    with tempfile.TemporaryDirectory(prefix="mrl-async-") as name:
        write_toy_model(Path(name) / "model")
        found = {**run(Path(name)), "commit": commit}
    print(found, flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
