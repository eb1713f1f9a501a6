"""This module runs an RL loop by the unmodified Tinker SDK beside `mrl train`, on SmolLM2-135M.

    make tinker-smollm                              # both; each continues where it stopped
    make tinker-smollm BENCH_ARGS="--only sdk"      # or mrl, or same

All sides train an adapter of rank 16 by GSPO and Adam (launch/recipes/smollm.yaml), with the prompts in
the same order: `mrl train`; the SDK's loop (`benchmarks.tinker_smollm_loop`) against `mrl serve`; and
the SDK on the very samples of `mrl train`, whose gradients have to be the same. Each side runs alone
with one thread for each process. CPU seconds are those of all its processes; other work on the machine
changes them less than the seconds of a clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import finish, summary, write_result
from benchmarks.smollm.measure import RECIPE, SET, TOLERANCE, WORK, Z, prepare
from mrl.diagnosis.tokens import load_tokens
from mrl.tinker.keys import Keys

SDK = ROOT / ".venv" / "tinker"
MODEL = ROOT / ".venv" / "smollm"
LOOP = "benchmarks.tinker_smollm_loop"
SIDES = {"mrl": "mrl train", "sdk": "SDK", "same": "SDK, mrl train's samples"}
SAME = 1e-3
"""The bound for the relative difference of gradient norms on the same samples."""
RANK, LR = 16, 3e-4
POLL_S = 0.5
START_LIMIT_S = 900.0
Row = dict[str, Any]


class CpuSeconds(threading.Thread):
    """Writes the CPU seconds that processes have used so far to a file, whenever a run has added a row
    to its metrics."""

    def __init__(self, metrics: Path, file: Path, *roots: int) -> None:
        super().__init__(daemon=True)
        self._metrics, self._file = metrics, file
        self._roots = [psutil.Process(pid) for pid in roots]
        self._ended = threading.Event()

    def run(self) -> None:
        known = rows_in(self._metrics)
        while not self._ended.wait(POLL_S):
            if (there := rows_in(self._metrics)) > known:
                known = there
                with self._file.open("a") as file:
                    row = {"pid": self._roots[0].pid, "step": there - 1, "cpu_s": self._used()}
                    file.write(json.dumps(row) + "\n")

    def _used(self) -> float:
        found = 0.0
        for root in self._roots:
            with suppress(psutil.NoSuchProcess):
                for each in (root, *root.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        times = each.cpu_times()
                        found += times.user + times.system
        return found

    def stop(self) -> None:
        self._ended.set()
        self.join()


def rows_in(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def environment(**more: str) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **threads, **offline, **more}


@contextmanager
def timed(metrics: Path, file: Path, *roots: int) -> Iterator[None]:
    """Record the CPU seconds of processes and their children during the block."""
    cpu = CpuSeconds(metrics, file, *roots)
    cpu.start()
    try:
        yield
    finally:
        cpu.stop()


def train_by_mrl(folder: Path, steps: int) -> None:
    """Run `mrl train`, or go on with it."""
    run = folder / "mrl_run"
    words = [
        *(RECIPE, f"output_dir={run}", f"model.path={WORK / 'dense'}"),
        *(f"data.path={WORK / 'data/train.jsonl'}", "data.shuffle=false"),
        *(f"lora.rank={RANK}", "lora.alpha=32", f"optimizer.lr={LR}"),
        *(f"train.num_steps={steps}", f"eval.every={steps}"),
    ]
    print(" ".join(("\n$ mrl train", *words)), flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "mrl", "train", *words], cwd=ROOT, env=environment()
    )
    with timed(run / "metrics.jsonl", folder / "mrl_cpu.jsonl", process.pid):
        code = process.wait()
    if code:
        raise RuntimeError(f"mrl train ended with exit code {code}")


def write_samples(run: Path, folder: Path, steps: int) -> None:
    """Write the samples of the steps of a run as rows that the loop reads."""
    folder.mkdir(exist_ok=True)
    for step in range(steps):
        record = load_tokens(run / f"tokens/step_{step:06d}.safetensors")
        rows = read_rows(run / f"rollouts/step_{step:06d}.jsonl")
        if not len(rows) == record.num_samples == record.num_samples_of_step:
            raise RuntimeError(f"the record of step {step} has not all of its samples")
        lines = []
        for i, row in enumerate(rows):
            part, first = record.sample(i), row["prompt_len"]
            tokens, logprobs = record.token_ids[part], record.rollout_logprobs[part]
            sample = {
                "prompt": tokens[:first].tolist(),
                "tokens": tokens[first:].tolist(),
                "logprobs": logprobs[first:].tolist(),
                "reward": row["reward"],
            }
            lines.append(json.dumps(sample) + "\n")
        (folder / f"{step:06d}.jsonl").write_text("".join(lines))


def train_by_sdk(folder: Path, steps: int, samples: Path | None = None) -> None:
    """Run the loop by the SDK against a service, or go on with it. `samples`: a folder of
    `write_samples`; None lets the loop sample."""
    side = "sdk" if samples is None else "same"
    out, service = folder / f"{side}_run", folder / "service"
    out.mkdir(parents=True, exist_ok=True)
    service.mkdir(exist_ok=True)
    config = {
        "model": {"path": str(WORK / "dense"), "dtype": "float32"},
        "moe": {"capture_routes": False},
        "lora": {"max_rank": RANK},
        "control": {"tinker": 0},
        "output_dir": str(service),
    }
    file = folder / "service.yaml"
    file.write_text(yaml.safe_dump(config))
    address = service / "tinker" / "address"
    address.unlink(missing_ok=True)
    print(f"\n$ mrl serve {file} & python -m {LOOP}", flush=True)
    serving = subprocess.Popen(
        [sys.executable, "-m", "mrl", "serve", str(file)], cwd=ROOT, env=environment()
    )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not address.exists():
            if serving.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("mrl serve has not started; its output is above")
            time.sleep(POLL_S)
        own = environment(
            PYTHONPATH=os.pathsep.join([str(ROOT), str(SDK)]),
            TINKER_BASE_URL=address.read_text().strip(),
            TINKER_API_KEY=key_of(service),
            TINKER_TELEMETRY="0",
        )
        words = ["--data", WORK / "data", "--output", out, "--steps", steps, "--rank", RANK]
        words += [] if samples is None else ["--samples", samples]
        loop = subprocess.Popen(
            [sys.executable, "-m", LOOP, *map(str, words), "--lr", str(LR)], cwd=ROOT, env=own
        )
        try:
            with timed(out / "metrics.jsonl", folder / f"{side}_cpu.jsonl", serving.pid, loop.pid):
                code = loop.wait()
        finally:
            loop.kill()
        if code:
            raise RuntimeError(f"the loop by the SDK ended with exit code {code}")
    finally:
        serving.terminate()
        serving.wait()


def key_of(service: Path) -> str:
    """Return the key of the loop's user, which owns the checkpoints of a loop that goes on."""
    file = service / "key"
    if not file.exists():
        file.touch(0o600)
        file.write_text(Keys(service).add("loop"))
    return file.read_text()


def read_rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def figures(rows: list[Row], cpu: list[Row], evals: list[dict[str, float]]) -> Row:
    """Return what one side measured. The seconds are medians, without the first step and without
    evaluations."""
    seconds = [row["time/step_s"] - row.get("time/eval_s", 0.0) for row in rows]
    tokens = [row["tokens/train"] for row in rows]
    used = [
        later["cpu_s"] - first["cpu_s"]
        for first, later in itertools.pairwise(cpu)
        if later["pid"] == first["pid"] and later["step"] == first["step"] + 1
    ]
    step_s = statistics.median(seconds[1:])
    cpu_s = statistics.median(used) if used else None
    per_step = statistics.fmean(tokens)
    return {
        "steps": len(rows),
        "rewards": [row["reward/mean"] for row in rows],
        "grad_norms": [row["grad_norm"] for row in rows],
        "held_out": evals,
        "tokens_per_step": per_step,
        "step_s": step_s,
        "rollout_s": statistics.median(row["time/rollout_s"] for row in rows[1:]),
        "train_s": statistics.median(row["time/train_s"] for row in rows[1:]),
        "step_cpu_s": cpu_s,
        "tokens_per_s": per_step / step_s,
        "tokens_per_cpu_s": None if cpu_s is None else per_step / cpu_s,
        "mismatch_mean": statistics.fmean(row["mismatch/logprob_abs_mean"] for row in rows),
        "mismatch_max": max(row["mismatch/logprob_abs_max"] for row in rows),
    }


def train(folder: Path, steps: int, only: str | None) -> None:
    """Run the sides, or go on with them."""
    prepare(MODEL)
    folder.mkdir(parents=True, exist_ok=True)
    if only in (None, "mrl"):
        train_by_mrl(folder, steps)
    if only in (None, "sdk"):
        train_by_sdk(folder, steps)
    if only in (None, "same"):
        write_samples(folder / "mrl_run", folder / "samples", steps)
        train_by_sdk(folder, steps, folder / "samples")


def found_by_mrl(folder: Path, steps: int) -> Row:
    run = folder / "mrl_run"
    evals = [json.loads((run / f"evals/step_{step:06d}.json").read_text()) for step in (0, steps)]
    held_out = [{"avg": e[f"{SET}/avg@4"], "stderr": e[f"{SET}/avg@4_stderr"]} for e in evals]
    return figures(read_rows(run / "metrics.jsonl"), read_rows(folder / "mrl_cpu.jsonl"), held_out)


def found_by_sdk(folder: Path, side: str) -> Row:
    run = folder / f"{side}_run"
    held_out = [json.loads((run / name).read_text()) for name in ("before", "after")]
    return figures(
        read_rows(run / "metrics.jsonl"), read_rows(folder / f"{side}_cpu.jsonl"), held_out
    )


def relative_differences(ones: list[float], others: list[float]) -> list[float]:
    """Return |a - b| / b of each pair; 0 where both are 0."""
    pairs = zip(ones, others, strict=True)
    return [abs(a - b) / max(b, 1e-12) if a != b else 0.0 for a, b in pairs]


def checks(sides: dict[str, Row]) -> list[tuple[str, bool]]:
    """Return (what is required, whether it holds)."""
    required = []
    for name, found in sides.items():
        before, after = found["held_out"]
        rise = after["avg"] - Z * after["stderr"] > before["avg"] + Z * before["stderr"]
        required.append((f"{name}: held-out avg@4 rises beyond both confidence intervals", rise))
        held = found["mismatch_max"] < TOLERANCE
        required.append((f"{name}: |engine - trainer| of a log-prob is below {TOLERANCE:g}", held))
    ours, same = sides[SIDES["mrl"]], sides[SIDES["same"]]
    apart = relative_differences(same["grad_norms"], ours["grad_norms"])
    required.append((f"on the same samples, gradient norms differ by at most {SAME:g}",
                     max(apart) < SAME))  # fmt: skip
    last = [found["held_out"][1] for found in (ours, same)]
    spread = Z * sum(each["stderr"] ** 2 for each in last) ** 0.5
    required.append(("on the same samples, both reach the same held-out avg@4 (95% interval)",
                     abs(last[0]["avg"] - last[1]["avg"]) < spread))  # fmt: skip
    return required


def show(sides: dict[str, Row]) -> None:
    table = Table(title="SmolLM2-135M with an adapter of rank 16", title_justify="left")
    columns = (
        *("side", "steps", "avg@4 before", "after", "step, s", "CPU s", "tokens/s"),
        *("tokens/CPU s", "mismatch max"),
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "side" else "right")
    for name, found in sides.items():
        evals = [f"{e['avg']:.3f} ± {Z * e['stderr']:.3f}" for e in found["held_out"]]
        cpu = [found["step_cpu_s"], found["tokens_per_cpu_s"]]
        known = ["" if value is None else f"{value:.1f}" for value in cpu]
        table.add_row(
            name, str(found["steps"]), *evals, f"{found['step_s']:.1f}", known[0],
            f"{found['tokens_per_s']:.1f}", known[1], f"{found['mismatch_max']:.1e}",
        )  # fmt: skip
    Console(width=120).print(table)


def main() -> None:
    """Run the sides, print the table and write runs/results/tinker_smollm.json."""
    parser = argparse.ArgumentParser(prog="make tinker-smollm", description=summary(__doc__))
    parser.add_argument("--steps", type=int, default=10, help="of each side")
    parser.add_argument("--only", choices=SIDES, help="run one side, and record nothing")
    parser.add_argument("--report", action="store_true", help="record the runs that are there")
    options = parser.parse_args()
    folder = WORK / "tinker"
    if not options.report:
        train(folder, options.steps, options.only)
    if options.only is not None:
        return
    sides = {SIDES["mrl"]: found_by_mrl(folder, options.steps)}
    sides |= {SIDES[name]: found_by_sdk(folder, name) for name in ("sdk", "same")}
    show(sides)
    verdicts = checks(sides)
    for text, holds in verdicts:
        print(f"{text}: {'yes' if holds else 'NO'}")
    passed = sum(holds for _, holds in verdicts)
    packages = ("torch", "transformers", "sglang", "megatron-core")
    failed = len(verdicts) - passed
    write_result("tinker_smollm", {"sides": sides}, passed=passed, failed=failed, packages=packages)
    finish(passed, failed)


if __name__ == "__main__":
    main()
