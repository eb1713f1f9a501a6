"""Kills the engine in the middle of rollouts, and checks every prompt and sample of every step.

It is one real training run of the toy model. In each step, at a random moment of the rollout, the
engine is killed (`kill -9` of its server, its scheduler or its detokenizer, by turns), and in the last
one hung (SIGSTOP of all of it). Checked: every step completes with exactly the prompts that the cursor
gives it, each with all its samples once; every loss is seen, in its step or, where the rollout was over
before it showed, in the next; afterwards no process and no listening port of any engine is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fault_table.base import RECIPE, ROOT
from mrl.config import load_recipe
from mrl.data.cursor import PromptCursor
from mrl.data.reader import read_prompts
from mrl.drill import Row
from mrl.drill.job import open_ports
from mrl.preflight import load_tokenizer
from mrl.toy_model import write_toy_model
from parallel.hf_config import HfModel

PROMPTS, SAMPLES, RESPONSE_LEN = 8, 8, 160
STALL_TIMEOUT_S = 10
STEP_TIMEOUT_S = 600
KILLED = ("child", "scheduler", "detokenizer")
"""Parts of the names of the processes of an SGLang server."""


class Run:
    """A run is `mrl train` as a child process, watched through its run folder."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self.output = folder / "run"
        model = folder / "model"
        write_toy_model(model)
        self.overrides = [
            f"model.path={model}", f"output_dir={self.output}", f"train.num_steps={num_steps}",
            f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}",
            f"rollout.max_response_len={RESPONSE_LEN}", f"rollout.min_response_len={RESPONSE_LEN}",
            f"rollout.stall_timeout_s={STALL_TIMEOUT_S}", "checkpoint.save_every=0",
        ]  # fmt: skip
        self.scratch = folder / "tmp"
        self.scratch.mkdir()
        self.log = open(folder / "train.log", "w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mrl", "train", str(RECIPE), *self.overrides],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.scratch)},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.seen: set[psutil.Process] = set()
        self.ports: set[int] = set()

    def metrics(self) -> list[dict[str, Any]]:
        path = self.output / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]]

    def wait_for_step(self, step: int) -> dict[str, Any]:
        """Wait until a step is done and return its metrics."""
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while len(rows := self.metrics()) <= step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.log.seek(0)
                raise SystemExit(f"faults: step {step} did not come:\n{self.log.read()[-4000:]}")
            time.sleep(0.01)
        return rows[step]

    def engine(self) -> list[psutil.Process]:
        """Return the processes of the engine that runs now, and remember them with their ports."""
        tree = [
            p for p in psutil.Process(self.process.pid).children(recursive=True) if _is_engine(p)
        ]
        self.seen |= set(tree)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.ports |= {
                    connection.laddr.port
                    for connection in process.net_connections(kind="inet")
                    if connection.status == psutil.CONN_LISTEN
                }
        return tree


def _is_engine(process: psutil.Process) -> bool:
    try:
        return "sglang" in " ".join(process.cmdline()) and not _is_zombie(process)
    except psutil.Error:
        return False


def _is_zombie(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_ZOMBIE


def strike(fault: str, run: Run) -> None:
    """Cause the fault as soon as the engine has the process that is meant: it may still be starting."""
    if fault == "hung":
        for process in run.engine():
            process.suspend()
        return
    while run.process.poll() is None:
        for victim in run.engine():
            with contextlib.suppress(psutil.NoSuchProcess):
                if fault in " ".join(victim.cmdline()):
                    victim.send_signal(signal.SIGKILL)
                    return


def expected_prompts(overrides: Sequence[str], num_steps: int) -> list[Counter[str]]:
    """Return what the cursor gives to each step: prompt ids, each with its number of samples."""
    recipe = load_recipe(RECIPE, list(overrides))
    tokenizer = load_tokenizer(HfModel.read(recipe.model.path))
    prompts = read_prompts(
        recipe.data,
        tokenizer,
        max_prompt_len=512 - RESPONSE_LEN,
        max_response_len=RESPONSE_LEN,
        min_rows=PROMPTS,
    )
    cursor = PromptCursor(prompts, seed=recipe.seed, shuffle=recipe.data.shuffle)
    return [
        Counter({prompt.prompt_id: SAMPLES for prompt in cursor.next(PROMPTS)})
        for _ in range(num_steps)
    ]


def left_behind(run: Run) -> list[str]:
    """Return the processes and ports of any engine of the run that are still there."""
    found = [f"process {p.pid}" for p in run.seen if p.is_running() and not _is_zombie(p)]
    return found + [f"port {port}" for port in open_ports(run.ports, run.scratch)]


@dataclass
class Struck:
    """A record of a run with faults: what each step measured and what does not hold."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """One a fault, in the order of the steps from step 1 on."""
    failures: list[str] = field(default_factory=list)
    """What does not hold, one sentence each."""
    last_restarts: float = 0.0
    """Engines that were replaced in the last step, which has no fault of its own."""


def strike_every_step(run: Run, faults: Sequence[str], seed: int) -> Struck:
    """Let the run go through all its steps, with one fault in each but the first and the last."""
    struck, chance = Struck(), random.Random(seed)
    try:
        calm = run.wait_for_step(0)
        for step, fault in enumerate(faults, start=1):
            share = 0.9 * chance.random()  # the first step is slower than the others
            time.sleep(calm["time/sync_s"] + share * calm["time/rollout_s"])
            strike(fault, run)
            struck.rows.append(_row(fault, share, run.wait_for_step(step)))
            print(f"step {step}: {struck.rows[-1]}", flush=True)
        run.engine()  # the last engine, in a last step without a fault
        last = run.wait_for_step(len(faults) + 1)
        struck.last_restarts = last["rollout/engine_restarts"]
        if run.process.wait(120) != 0:
            struck.failures.append(f"the run ended with exit code {run.process.returncode}")
    finally:
        run.process.kill()
        run.process.wait()
    return struck


def _row(fault: str, share: float, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "fault": fault if fault == "hung" else f"kill -9 {fault}",
        "at_share_of_rollout": round(share, 3),
        "restarts": metrics["rollout/engine_restarts"],
        "recovery_s": round(metrics["time/recovery_s"], 2),
        "rollout_s": round(metrics["time/rollout_s"], 2),
    }


def wrong_samples(run: Run, num_steps: int) -> list[str]:
    """Return the steps whose prompts or samples are not those that the cursor gave."""
    found = []
    for step, expected in enumerate(expected_prompts(run.overrides, num_steps)):
        lines = (run.output / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()
        samples = [(row["prompt_id"], row["completion"]) for row in map(json.loads, lines)]
        if Counter(prompt for prompt, _ in samples) != expected:
            found.append(f"step {step}: other prompts or numbers of samples than expected")
        if len(set(samples)) != len(samples):  # random ones, of 160 tokens
            found.append(f"step {step}: a sample is there twice")
    return found


def not_replaced(struck: Struck) -> list[str]:
    """Return the faults after which no other engine was started, in their step or in the next."""
    restarts = [*(row["restarts"] for row in struck.rows), struck.last_restarts]
    return [
        f"step {step}: {row['fault']}: the engine was not replaced"
        for step, row in enumerate(struck.rows, start=1)
        if not restarts[step - 1] + restarts[step]
    ]


def rows(kills: int, seed: int) -> Iterator[tuple[int, Row]]:
    """Yield (9, row) for each fault of one run with `kills` kills and a hang."""
    faults = [KILLED[i % len(KILLED)] for i in range(kills)] + ["hung"]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), 2 + len(faults))
        struck = strike_every_step(run, faults, seed)
        struck.failures += wrong_samples(run, 2 + len(faults)) + left_behind(run)
    struck.failures += not_replaced(struck)
    for number, row in enumerate(struck.rows):
        share = f"at {row['at_share_of_rollout']:.0%} of the rollout"
        text = f"{row['restarts']:g} engine(s) replaced; the step has its prompts and samples once each"
        problems = tuple(struck.failures) if number == len(struck.rows) - 1 else ()
        name = f"engine-{number + 1}"
        did = f"{row['fault']} {share}"
        yield 9, Row(name, did, text, row["recovery_s"], "recovered", None, problems)
