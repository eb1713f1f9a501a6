"""Start a run of one side in processes of its own, and read what it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.evidence.digest import ROOT

RECIPE = "launch/recipes/toy_moe.yaml"
POLL_S = 2.0


@dataclass(frozen=True)
class Work:
    """What every side of a comparison does: the same model, prompts, samples and lengths."""

    model: str
    num_steps: int
    prompts: int
    samples: int
    min_tokens: int
    max_tokens: int
    data: str = str(ROOT / "launch/recipes/data/first_char.jsonl")
    reward: str = "mrl.rewards.first_char:reward"
    """Module and function of the reward. mrl's recipe names the same function."""
    recipe: str = RECIPE
    """mrl's recipe."""
    lr: float = 1e-3
    seed: int = 0
    overrides: tuple[str, ...] = ()
    """What mrl's recipe needs besides."""
    accumulation: int = 1
    """How many backward passes TRL makes of a step's samples. More need less memory."""


@dataclass
class Outcome:
    """What a run took. Each list has one entry per step, without the first, which warms up."""

    start_s: float = 0.0
    """Seconds from the start of the command to the first step."""
    peak_bytes: int = 0
    """The largest sum of the proportional set sizes (PSS) of the command's processes."""
    step_s: list[float] = field(default_factory=list)
    generate_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """The mean reward of each step, the first included."""

    @property
    def tokens_per_s(self) -> list[float]:
        """Tokens of the answers per second of generation, of each step."""
        return [n / s for n, s in zip(self.tokens, self.generate_s, strict=True)]

    @property
    def rest_s(self) -> list[float]:
        """Seconds of a step without generation."""
        return [a - b for a, b in zip(self.step_s, self.generate_s, strict=True)]


def train_with_mrl(work: Work, checkout: Path = ROOT) -> Outcome:
    """Run `mrl train` of a checkout, or its rollouts alone if an override says so."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mrl", "train", work.recipe, f"model.path={work.model}"]
        command += [
            f"output_dir={folder}/run",
            f"train.num_steps={work.num_steps}",
            f"rollout.prompts_per_step={work.prompts}",
            f"rollout.samples_per_prompt={work.samples}",
            f"rollout.max_response_len={work.max_tokens}",
            f"rollout.min_response_len={work.min_tokens}",
            f"optimizer.lr={work.lr}",
            f"seed={work.seed}",
            *work.overrides,
        ]
        began, peak = _run(command, checkout)
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    steps = [
        {
            "step_s": row["time/step_s"],
            "generate_s": row["time/rollout_s"] + row.get("time/score_s", 0.0),
            "tokens": row["tokens/rollout"],
            "reward": row["reward/mean"],
        }
        for row in rows
    ]
    start_s = rows[0]["time/timestamp"] - rows[0]["time/step_s"] - began
    return _outcome({"start_s": start_s, "steps": steps}, peak)


def run_module(module: str, work: Work, packages: Path | None = None) -> Outcome:
    """Run a module of this package with the work; `packages` is a folder with further packages."""
    with tempfile.TemporaryDirectory() as folder:
        given, written = Path(folder, "work.json"), Path(folder, "out.json")
        given.write_text(json.dumps(asdict(work)))
        command = [sys.executable, "-m", module, str(given), str(written)]
        _, peak = _run(command, ROOT, packages)
        found = json.loads(written.read_text())
    return _outcome(found, peak)


def _outcome(found: dict[str, Any], peak_bytes: int) -> Outcome:
    outcome = Outcome(found.get("start_s", 0.0), peak_bytes)
    outcome.rewards = [step.get("reward", 0.0) for step in found["steps"]]
    for step in found["steps"][1:]:
        outcome.step_s.append(step.get("step_s", step["generate_s"]))
        outcome.generate_s.append(step["generate_s"])
        outcome.tokens.append(step["tokens"])
    return outcome


def _run(command: Sequence[str], checkout: Path, packages: Path | None = None) -> tuple[float, int]:
    """Run a command with one thread for each process; return when it began (seconds since 1970), and
    its peak memory. Raises RuntimeError with the end of its output if it fails."""
    began = time.time()
    path = [str(checkout), *([str(packages)] if packages else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PEERS_STARTED": str(began),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        memory = PeakMemory(process.pid)
        memory.start()
        code = process.wait()
        peak = memory.stop()
        if code:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)}: exit code {code}\n{log.read()[-3000:]}")
    return began, peak


class PeakMemory(threading.Thread):
    """Notes the largest memory of a process and its descendants, as a sum of PSS in bytes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process, self._ended, self._peak = psutil.Process(pid), threading.Event(), 0

    def run(self) -> None:
        """Look every POLL_S seconds until `stop`."""
        while not self._ended.wait(POLL_S):
            total = 0
            with suppress(psutil.NoSuchProcess):
                for each in (self._process, *self._process.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        total += each.memory_full_info().pss
            self._peak = max(self._peak, total)

    def stop(self) -> int:
        """End the thread and return the peak."""
        self._ended.set()
        self.join()
        return self._peak
