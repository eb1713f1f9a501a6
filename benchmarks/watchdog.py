"""This module stops ranks at random moments and checks what the watchdog says.

Two ranks train the toy model on saved rollouts. In each trial one of them, drawn at random, is stopped
(SIGSTOP) a random moment after it came into a random phase. Checked: the report names this rank and
this phase, within twice the limit. Then a run of many steps, with a busy process for each core, must
end without a report. Also measured: what a sign of progress costs. No engine runs, so the phases sync,
score and evaluate are not among them. Prints one line a trial and the sums.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import finish, summary
from mrl.commands.train import train
from mrl.config import load_recipe
from mrl.run.failure import read_failure
from mrl.system import heartbeat
from mrl.toy_model import write_toy_model
from parallel.mesh import world_size
from tests.ranks import _store, run_ranks, start_fork
from tests.watch.ranks import ranks_of, stop_in

RECIPE = Path(__file__).resolve().parents[1] / "launch/recipes/toy_moe.yaml"
PHASES = ("load", "rollout", "logprobs", "train", "save", "log")
TRIALS, STEPS, LIMIT_S = 50, 200, 3.0
RECORDED_STEPS = 4
SMALL = (
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_response_len=12"),
    *("rollout.min_response_len=0", "train.micro_batch_tokens=160"),
)


def overrides(folder: Path, output: Path, *more: str) -> list[str]:
    """Return the overrides of a run on the saved rollouts of `folder`."""
    return [
        *SMALL, f"model.path={folder / 'model'}", f"output_dir={output}",
        f"debug.load_rollouts={folder / 'rollouts'}", "parallel.tensor_model_parallel_size=2", *more,
    ]  # fmt: skip


def train_with(words: Sequence[str]) -> None:
    """Train on this rank, without a word."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    train(load_recipe(RECIPE, list(words)), world_size())


def record(folder: Path) -> None:
    """Record some steps with an engine, and give them out as those of a long run."""
    write_toy_model(folder / "model")
    words = [
        *SMALL, f"model.path={folder / 'model'}", f"output_dir={folder / 'recorded'}",
        f"train.num_steps={RECORDED_STEPS}", "debug.save_rollouts=true", "checkpoint.save_every=0",
    ]  # fmt: skip
    run_ranks(1, train_with, words, folder=folder / "out")
    (folder / "rollouts").mkdir()
    for step in range(STEPS):
        source = folder / f"recorded/rollouts/step_{step % RECORDED_STEPS:06d}.safetensors"
        (folder / f"rollouts/step_{step:06d}.safetensors").symlink_to(source)


@contextlib.contextmanager
def two_ranks(words: Sequence[str], folder: Path) -> Iterator[list[ForkProcess]]:
    """Run two ranks, forks of this process, during the block."""
    with _store() as port:
        ranks = [start_fork(_rank, rank, port, words) for rank in range(2)]
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _rank(rank: int, port: int, words: Sequence[str]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    train_with(words)


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    """Stop a rank in one run; return what was done and what the report says."""
    phase, rank = draw.choice(PHASES), draw.randrange(2)
    output = folder / f"trial_{number}"
    words = overrides(
        folder, output, "checkpoint.save_every=1", "algorithm.kl_coef=0.1",
        f"train.num_steps={STEPS}", *(f"watch.limits.{each}={LIMIT_S}" for each in PHASES),
    )  # fmt: skip
    step = -1 if phase == "load" else draw.randrange(3)
    row: dict[str, Any] = {"rank": rank, "phase": phase, "named": "", "found_s": None}
    with two_ranks(words, folder) as ranks:
        deadline = time.monotonic() + 120
        found = []
        while not found and time.monotonic() < deadline and ranks[rank].is_alive():
            found = [each for each in ranks_of(os.getpid()) if each.pid == ranks[rank].pid]
        if not found or stop_in(found[0], phase, step, draw.random() * 0.05, 100) is None:
            return row | {"named": "the rank was not in this phase"}
        start = time.monotonic()
        while (report := read_failure(output)) is None and time.monotonic() < start + 10 * LIMIT_S:
            time.sleep(0.05)
        if report is not None:
            row["found_s"] = round(time.monotonic() - start, 2)
            row["named"] = f"rank {report.rank}, {report.phase}"
    return row


def busy() -> None:
    """Take what a core gives."""
    while True:
        sum(range(1000))


def calm(folder: Path, steps: int) -> tuple[int, float]:
    """Run `steps` steps beside busy processes; return the steps done and the seconds."""
    output, start = folder / "calm", time.monotonic()
    words = overrides(
        folder, output, f"train.num_steps={steps}", "checkpoint.save_every=50",
        *(f"watch.limits.{each}=20" for each in PHASES),
    )  # fmt: skip
    load = [start_fork(busy) for _ in range(os.cpu_count() or 1)]
    try:
        with two_ranks(words, folder) as ranks:
            for rank in ranks:
                rank.join(3600)
    finally:
        for process in load:
            process.kill()
            process.join()
    rows = (output / "metrics.jsonl").read_text().splitlines()
    return len(rows) if read_failure(output) is None else -1, time.monotonic() - start


def cost_of_a_beat() -> float:
    """Return the microseconds of a processor that one sign of progress takes."""
    heartbeat.open_page()
    start = time.process_time()
    for _ in range(100_000):
        heartbeat.beat()
    seconds = time.process_time() - start
    heartbeat.close_page()
    return seconds * 10


def main() -> None:
    """Run the trials and the long run, write the result, and exit with 1 where a check failed."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, rows = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder)
        for number in range(options.trials):
            row = trial(folder, number, draw)
            is_right = row["named"] == f"rank {row['rank']}, {row['phase']}"
            row["passed"] = is_right and row["found_s"] <= 2 * LIMIT_S
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
        steps, seconds = calm(folder, options.steps) if options.steps else (0, 0.0)
    beat_us = cost_of_a_beat()
    print(f"by phase: {dict(Counter(row['phase'] for row in rows))}")
    longest_s = max((row["found_s"] or 0.0 for row in rows), default=0.0)
    print(f"found after at most {longest_s} s of {2 * LIMIT_S} s")
    print(f"{steps} steps without a false alarm, {seconds:.0f} s; a beat costs {beat_us:.2f} us")
    checks = [*(row["passed"] for row in rows), steps == options.steps]
    passed, failed = sum(checks), len(checks) - sum(checks)
    finish(passed, failed)


if __name__ == "__main__":
    main()
