"""A service with the real engine on a toy model, and the runs of its tenants alone to compare with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from mrl.config.load import load_service
from mrl.service.client import ControlClient
from mrl.service.record import read_tenants
from mrl.service.registry import Registry
from mrl.system.files import write_whole
from parallel.checkpoint.saved_tensors import SavedTensors
from tests.engine_starts import REAL
from tests.loop.forked import Command

ROOT = Path(__file__).parents[2]
LIMIT_S = 400.0
TIMED = (
    *("time/", "throughput/", "memory/", "async/trainer_idle", "async/rollout_idle"),
    *("guard/ratio_error", "guard/clip_budget"),  # only of a step with a pass before the update
)
"""Metrics that no two runs have alike."""
TENANTS: dict[str, dict[str, Any]] = {
    "ann": {
        "lora": {"rank": 8, "alpha": 16, "experts": "per_expert"},
        "algorithm": {"name": "gspo"},
        "seed": 1,
    },
    "bob": {
        "lora": {"rank": 4, "alpha": 4, "experts": "none"},
        "algorithm": {"name": "grpo"},
        "optimizer": {"lr": 1e-2},
        "seed": 2,
    },
    "cec": {
        "lora": {"rank": 2, "alpha": 8, "experts": "per_expert", "targets": ["q_proj", "o_proj"]},
        "algorithm": {"name": "gspo", "kl_coef": 0.01},
        "seed": 3,
    },
}
"""Tenants that differ in rank, targets, experts, algorithm, learning rate and seed."""


@dataclass(frozen=True)
class Service:
    """A service folder, and how to run the service and its tenants."""

    folder: Path
    model: Path
    ranks: int = 1

    @property
    def config(self) -> Path:
        return self.folder.with_suffix(".yaml")

    def write(self, **more: Any) -> None:
        """Write the configuration of a service in deterministic mode."""
        tree = {
            "model": {"path": str(self.model), "dtype": "float32"},
            "rollout": {"batch_invariant": True, "context_len": 64, "max_total_tokens": 2048},
            "lora": {"max_rank": 8, "experts": ["per_expert"]},
            "output_dir": str(self.folder),
            **more,
        }
        write_whole(self.config, yaml.safe_dump(tree))

    @property
    def _mrl(self) -> list[str]:
        """How mrl is started on all ranks."""
        if self.ranks == 1:
            return [sys.executable, "-W", "ignore", "-m", "mrl"]
        ranks = ["--standalone", f"--nproc-per-node={self.ranks}"]
        return [sys.executable, "-W", "ignore", "-m", "mrl.launch", *ranks, "-m", "mrl"]

    def run_of(self, name: str) -> Path:
        return self.folder / "runs" / name

    def recipe(self, name: str, num_steps: int, **more: Any) -> dict[str, Any]:
        """Return the keys of a tenant's recipe."""
        return {
            "train": {"num_steps": num_steps, "micro_batch_tokens": 512},
            "rollout": {
                "prompts_per_step": 4, "samples_per_prompt": 4, "max_response_len": 12,
            },
            "moe": {"routing_replay": "r3"},
            "reward": "first_char",
            "data": {"path": str(ROOT / "launch/recipes/data/first_char.jsonl")},
            "checkpoint": {"save_every": 1},
            "optimizer": {"lr": 3e-3},
            "output_dir": str(self.run_of(name)),
            **TENANTS.get(name, TENANTS["ann"]),
            **more,
        }  # fmt: skip

    def add(self, *names: str, num_steps: int, **more: Any) -> None:
        """Put tenants into the queue of a service that does not run."""
        with Registry(load_service(self.config)) as registry:
            for name in names:
                registry.add(name, self.recipe(name, num_steps, **more))

    def states(self) -> dict[str, tuple[str, str]]:
        """Return state and reason of each tenant that was not removed."""
        tenants = [each for each in read_tenants(self.folder) if each.state != "removed"]
        return {each.name: (each.state, each.reason) for each in tenants}

    def command(self, *words: str) -> list[str]:
        """Return the command that starts the service."""
        return [*self._mrl, "serve", str(self.config), *words]

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        log = self.folder.with_suffix(".log").open("ab")
        return subprocess.Popen(
            self.command(*words),
            cwd=ROOT, stdout=log, stderr=log, env=environment(),
        )  # fmt: skip

    def run(self) -> None:
        """Serve until no tenant is left that could run, in a fork of this process where it may be one:
        a new Python spends 20 CPU seconds on imports, its engine's among them."""
        if self.ranks == 1 and os.environ.get(REAL) != "1":
            words = ["serve", str(self.config), "--until-done"]
            done = Command(words, environment(), self.folder.with_suffix(".printed")).finish(
                LIMIT_S
            )
            assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
            return
        code = self.start("--until-done").wait(LIMIT_S)
        assert code == 0, self.folder.with_suffix(".log").read_text()[-4000:]

    def client(self) -> ControlClient:
        return ControlClient(self.folder)

    def train_alone(self, name: str, output: Path) -> None:
        """Run a tenant's recipe by `mrl train`, with nobody beside it."""
        recipe = self.folder / "tenants" / name / "recipe.yaml"
        done = subprocess.run(
            [*self._mrl, "train", str(recipe), f"output_dir={output}"],
            cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, less those that no two runs have alike."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in rows]


def require_sane_rounds(service: Path, *names: str) -> None:
    """Assert that the metrics of a service say how full the engine was, and whose requests and updates
    these were. All of these tenants are in every round."""
    lines = (service / "metrics.jsonl").read_text().splitlines()
    assert lines
    for row in map(json.loads, lines):
        for key in ("engine_occupancy", "kv_occupancy", "kv_counted"):
            assert 0 < row[f"service/{key}"] <= 1, row
        assert 0 < row["service/running_requests"] <= 16 * len(names)
        assert 1 <= row["service/batch_tenants"] <= len(names)
        for share in ("batch_share", "trainer_share"):
            parts = [row[f"service/{name}/{share}"] for name in names]
            assert min(parts) > 0
            assert abs(sum(parts) - 1) < 1e-9
        for name in names:
            assert row[f"service/{name}/tokens"] >= 16  # answers to 4 prompts, 4 to each
            assert 0 <= row[f"service/{name}/gate_wait_s"] < row["time/rollout_s"]


def require_same_bits(one: Path, other: Path, but: Sequence[str] = ()) -> None:
    """Assert that two runs have the same metrics, less those of `but`, samples and final weights."""
    ours, theirs = rows_of(one), rows_of(other)
    for mine, its in zip(ours, theirs, strict=True):
        different = {
            k: (mine.get(k), its.get(k))
            for k in {*mine, *its} - {*but}
            if mine.get(k) != its.get(k)
        }
        assert not different
    step = len(ours)
    for file in sorted(f.name for f in (other / "rollouts").glob("*.jsonl")):
        assert (one / "rollouts" / file).read_bytes() == (other / "rollouts" / file).read_bytes()
    saved = [SavedTensors(run / f"checkpoints/iter_{step:07d}") for run in (one, other)]
    first, second = ({k: s[k] for k in s if not k.startswith("random.")} for s in saved)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    """Return when the condition holds. Fails where the service ends before."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, "the service ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)
