"""This module hangs ranks of real runs and looks at what the watchdog says: `make watchdog`.

Each trial is a run of the toy model on two ranks. A random rank hangs in a random phase at a random
moment (benchmarks/watched_rank.py), which it notes before. Checked: the watchdog finds it within twice
the limit of the phase, names the rank and the phase, and writes the stacks of both ranks; the launcher
exits with 72, and no process is left. Then comes a run without a fault beside busy loops on all cores:
nothing may be reported, and heartbeat and monitor may take 0.5% of a step. Two trials run at once
(`--jobs`), as each mostly waits for its limit; only one of them starts at a time. Trials that are on
file in `--folder`, by the same code, are not repeated. Writes runs/results/watchdog.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.evidence.catalog import target_of
from benchmarks.evidence.result import finish, provenance, summary, write_result
from benchmarks.watched_rank import KINDS, PLACES, VARIABLE, Trial, encoded, end_marked
from mrl.errors import ExitCode
from mrl.system.heartbeat import kind_of
from mrl.toy_model import write_toy_model

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "launch" / "recipes" / "toy_moe.yaml"
WORLD = 2
NUM_TRIALS = 50
NUM_HELD = 10
"""Trials of another kind: a thread of the rank keeps Python's lock."""
CALM_STEPS = 200
LIMITS = {
    **{"start": 90, "load": 30, "sync": 10, "rollout": 10, "score": 10},
    **{"logprobs": 8, "train": 8, "save": 8, "log": 8},
}
"""Seconds, for the trials; the run without a fault has the limits that it learns."""
START_LIMIT_S = 15
"""The limit of the start where no engine is started."""
SAVED_STEPS = 8
TRIAL_TIMEOUT_S = 600
_starts = threading.Lock()
"""Held by the trial whose ranks start: two starts side by side would take their limits' time."""
GOES_AS = {"start": ("start", "load")}
"""Phases of the watchdog that a place of a trial may belong to, where they are not of one name."""
NO_ENGINE = ("start", "logprobs", "train", "save")
"""Phases that are hung in runs of saved rollouts, which start faster."""
MOST_OF_A_STEP = 0.005


def chosen(number: int, seed: int, folder: Path) -> Trial:
    """Return the trial of a number, always the same one."""
    chance = random.Random(f"{seed} {number}")
    phase = chance.choice(list(PLACES))
    return Trial(
        rank=chance.randrange(WORLD),
        phase=phase,
        kind=KINDS[0] if number < NUM_TRIALS else KINDS[1],
        occurrence=0 if phase == "start" else chance.randrange(1, 4),
        share=round(chance.uniform(0.05, 0.9), 3),
        note=str(folder / f"hung_{number}"),
    )


def overrides(folder: Path, output: Path, *more: str) -> list[str]:
    """Return the toy recipe with small steps, as arguments of `mrl train`."""
    return [
        str(RECIPE), f"model.path={folder / 'model'}", f"output_dir={output}",
        "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_response_len=12",
        "rollout.min_response_len=0", "train.micro_batch_tokens=160", *more,
    ]  # fmt: skip


def launched(arguments: Sequence[str], module: str = "mrl", world: int = WORLD) -> list[str]:
    """Return the command that starts the ranks."""
    launcher = [sys.executable, "-m", "mrl.launch", "--standalone"]
    return [*launcher, f"--nproc-per-node={world}", "-m", module, "train", *arguments]


def prepare(folder: Path) -> None:
    """Make the model, and a run whose rollouts the trials read."""
    if (folder / "saved" / "metrics.jsonl").exists():
        return
    shutil.rmtree(folder / "saved", ignore_errors=True)
    write_toy_model(folder / "model")
    more = ("debug.save_rollouts=true", f"train.num_steps={SAVED_STEPS}", "checkpoint.save_every=0")
    arguments = overrides(folder, folder / "making", *more)
    subprocess.run([sys.executable, "-m", "mrl", "train", *arguments], cwd=ROOT, check=True)
    (folder / "making").rename(folder / "saved")


def limits_of(trial: Trial) -> dict[str, int]:
    """Return the limits of a trial's run in seconds, by phase."""
    without_engine = dict.fromkeys(GOES_AS["start"], START_LIMIT_S)
    return LIMITS | (without_engine if trial.phase in NO_ENGINE else {})


def keys_of(trial: Trial, folder: Path) -> list[str]:
    """Return the keys in which a trial's run differs from the toy recipe."""
    keys = [
        f"train.num_steps={SAVED_STEPS}", "checkpoint.save_every=1", "checkpoint.keep=2",
        "diagnosis.decompose_every=0",  # its passes are no part of a phase that is tried
        *(f"watch.limits.{phase}={limit}" for phase, limit in limits_of(trial).items()),
    ]  # fmt: skip
    if trial.phase in NO_ENGINE:
        keys.append(f"debug.load_rollouts={folder / 'saved' / 'rollouts'}")
    if trial.phase == "logprobs":  # with one update a step, only the first step has this phase
        keys.append("train.num_epochs_per_rollout=2")
    return keys


def try_trial(number: int, trial: Trial, folder: Path) -> dict[str, Any]:
    """Run a trial and return what came of it."""
    output = folder / f"trial_{number}"
    shutil.rmtree(output, ignore_errors=True)
    Path(trial.note).unlink(missing_ok=True)
    arguments = overrides(folder, output, *keys_of(trial, folder))
    with open(folder / f"trial_{number}.log", "w") as log:
        with _starts:
            begin = time.time()
            process = subprocess.Popen(
                launched(arguments, "benchmarks.watched_rank"), cwd=ROOT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: encoded(trial)},
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            _wait_for_start(process, Path(trial.note), output / "metrics.jsonl")
        try:
            code: int | None = process.wait(TRIAL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        ended = time.time()
    row = _row(number, trial, output, code, ended)
    return {**row, "seconds": round(ended - begin, 1), "left": end_marked(trial.note)}


def _wait_for_start(process: subprocess.Popen[bytes], *signs: Path) -> None:
    """Wait until the run has hung, has taken its first step, or has ended."""
    deadline = time.monotonic() + TRIAL_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if any(sign.exists() for sign in signs):
            return
        time.sleep(0.1)


def _row(number: int, trial: Trial, output: Path, code: int | None, ended: float) -> dict[str, Any]:
    note, record = Path(trial.note), output / "failure.json"
    failure = json.loads(record.read_text()) if record.exists() else {}
    begin = float(note.read_text()) if note.exists() else None
    stacks = [output / "logs" / f"stacks_rank_{rank}.txt" for rank in range(WORLD)]
    return {
        "trial": number, "kind": trial.kind, "rank": trial.rank, "phase": trial.phase,
        "limit_s": limits_of(trial)[trial.phase], "exit_code": code,
        "has_hung": begin is not None,
        "named_rank": failure.get("rank"), "named_phase": failure.get("phase"),
        "found_s": None if begin is None or not failure else round(failure["time"] - begin, 2),
        "ended_s": None if begin is None else round(ended - begin, 2),
        "num_stacks": sum(file.exists() and file.stat().st_size > 0 for file in stacks),
        "what": failure.get("what", ""),
    }  # fmt: skip


def faults_of(row: Mapping[str, Any]) -> list[str]:
    """Return what does not hold in a trial, one sentence each."""
    if not row["has_hung"]:
        return [f"the rank did not hang, and the run ended with {row['exit_code']}: {row['what']}"]
    found: list[str] = []
    if row["exit_code"] != ExitCode.HUNG_RANK:
        found.append(f"the exit code is {row['exit_code']}, expected {ExitCode.HUNG_RANK.value}")
    if row["found_s"] is None:
        return [*found, "no failure.json"]
    if not 0 <= row["found_s"] <= 2 * row["limit_s"]:
        found.append(f"found after {row['found_s']} s, expected at most {2 * row['limit_s']} s")
    if row["named_rank"] != row["rank"]:
        found.append(f"names rank {row['named_rank']}, expected {row['rank']}")
    if kind_of(row["named_phase"] or "") not in GOES_AS.get(row["phase"], (row["phase"],)):
        found.append(f"names phase {row['named_phase']}, expected {row['phase']}")
    if row["num_stacks"] != WORLD:
        found.append(f"stacks of {row['num_stacks']} ranks, expected {WORLD}")
    if row["left"]:
        found.append(f"{row['left']} processes were left")
    return found


def run_trials(
    numbers: Sequence[int], seed: int, folder: Path, num_jobs: int = 1
) -> list[dict[str, Any]]:
    """Return the rows of all trials, of which `num_jobs` run at once; those that this code has on file
    are read there."""
    file = folder / "trials.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    code = provenance(target_of("watchdog").measures)["digest"]
    rows = {row["trial"]: row for row in map(json.loads, lines) if row["digest"] == code}

    def take(number: int) -> dict[str, Any]:
        return {**try_trial(number, chosen(number, seed, folder), folder), "digest": code}

    with ThreadPoolExecutor(num_jobs) as pool:
        for row in pool.map(take, [number for number in numbers if number not in rows]):
            rows[row["trial"]] = row
            with file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            print(json.dumps(row), *faults_of(row), flush=True)
    return [rows[number] for number in numbers]


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy meanwhile."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def calm_run(folder: Path, num_steps: int) -> dict[str, Any]:
    """Train with engines beside busy loops; return how it ended and what the watchdog took."""
    output = folder / "calm"
    shutil.rmtree(output, ignore_errors=True)
    more = (f"train.num_steps={num_steps}", "checkpoint.save_every=20")
    command = launched(overrides(folder, output, *more))
    seconds: dict[int, float] = {}
    with busy_cores(), open(folder / "calm.log", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        begin = time.monotonic()
        while process.poll() is None:
            seconds |= _seconds_of_watchers(process.pid)
            time.sleep(1)
        wall_s = time.monotonic() - begin
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": len(rows),
        "exit_code": process.returncode,
        "alarm": (output / "failure.json").exists(),
        "median_step_s": round(statistics.median(row["time/step_s"] for row in rows), 3),
        "watch_cpu_share": round(sum(seconds.values()) / wall_s / (os.cpu_count() or 1), 6),
    }


def _seconds_of_watchers(launcher: int) -> dict[int, float]:
    """Return the CPU seconds so far of each process of the watchdog, by its number."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if "mrl.watch" in words or "mrl/watch" in words:
                    times = process.cpu_times()
                    found[process.pid] = times.user + times.system
    return found


def seconds_of_marks(num_marks: int = 100_000) -> float:
    """Return the seconds that one mark of the heartbeat takes, a phase counted as two."""
    from mrl.system import heartbeat

    heartbeat.open_page()
    try:
        begin = time.perf_counter()
        for _ in range(num_marks // 3):
            with heartbeat.phase("train"):
                heartbeat.beat()
        return (time.perf_counter() - begin) / num_marks
    finally:
        heartbeat.close_page()


def faults_of_calm(calm: Mapping[str, Any], num_steps: int) -> list[str]:
    """Return what does not hold in the run without a fault."""
    found = []
    if calm["alarm"] or calm["exit_code"] or calm["steps"] != num_steps:
        found.append(f"the run without a fault ended with {calm['exit_code']}: {calm}")
    if calm["watch_cpu_share"] > MOST_OF_A_STEP:
        found.append(f"the watchdog takes {calm['watch_cpu_share']:.2%} of the CPU time")
    return found


def main() -> None:
    """Run what is asked for, write the result of a whole run, and exit with 1 where a check failed."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--trials", type=int, default=NUM_TRIALS + NUM_HELD)
    parser.add_argument("--steps", type=int, default=CALM_STEPS, help="of the run without a fault")
    parser.add_argument("--jobs", type=int, default=2, help="trials that run at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--write", action="store_true", help="write the result of fewer trials or steps, too"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "watchdog")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    rows = run_trials(range(options.trials), options.seed, folder, options.jobs)
    faults = [f"trial {row['trial']}: {text}" for row in rows for text in faults_of(row)]
    failed = sum(bool(faults_of(row)) for row in rows)
    content: dict[str, Any] = {"trials": rows, "mark_s": round(seconds_of_marks(), 9)}
    if options.steps:
        content["calm"] = calm_run(folder, options.steps)
        wrong = faults_of_calm(content["calm"], options.steps)
        faults, failed = faults + wrong, failed + bool(wrong)
        print(content["calm"])
    passed = len(rows) + bool(options.steps) - failed
    for fault in faults:
        print(fault)
    found = [row["found_s"] / row["limit_s"] for row in rows if row["found_s"] is not None]
    if found:
        median = statistics.median(found)
        print(f"found after {median:.2f} limits (median), {max(found):.2f} at most")
    is_whole = (options.trials, options.steps) == (NUM_TRIALS + NUM_HELD, CALM_STEPS)
    if is_whole or options.write:
        packages = ("torch", "sglang", "megatron-core")
        write_result("watchdog", content, passed=passed, failed=failed, packages=packages)
    finish(passed, failed)


if __name__ == "__main__":
    main()
