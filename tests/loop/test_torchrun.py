"""Two ranks under the launch script: from saved rollouts; with two engines, and with one for both."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.config import load_recipe
from mrl.jobs.train import train
from mrl.run.callbacks import Callback
from parallel.checkpoint.manifest import latest_step
from parallel.mesh import world_size
from tests.loop.conftest import REPOSITORY, TOY_RECIPE, Toy, environment
from tests.loop.test_run import metrics, processes_of
from tests.ranks import run_ranks


def is_server(process: psutil.Process) -> bool:
    """The first process of an engine; those that it forks have other names in time."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return "rollout.sglang.child" in " ".join(process.cmdline()) and not (
            parent is not None and "rollout.sglang.child" in " ".join(parent.cmdline())
        )
    return False


@pytest.mark.release
@pytest.mark.timeout(300)
def test_two_ranks_train_on_saved_rollouts(toy: Toy, recorded: Path, tmp_path: Path) -> None:
    """New Pythons that meet by torchrun's rendezvous take the step of the recorded run."""
    output = tmp_path / "run"
    overrides = toy.overrides(
        output,
        f"debug.load_rollouts={recorded / 'rollouts'}",
        "train.num_steps=1",
        "parallel.tensor_model_parallel_size=2",
    )
    done = subprocess.run(
        ["bash", "launch/torchrun.sh", str(TOY_RECIPE), *overrides],
        cwd=REPOSITORY,
        env=environment(NPROC="2", MRL_TEST_RUN=str(output)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = metrics(output)
    for key in ("grad_norm", "entropy", "reward/mean", "routing/replay_coverage"):
        assert row[key] == pytest.approx(metrics(recorded)[0][key], rel=1e-5), key
    # A byte for each of 4 layers: the first rank sends its pair the rollouts.
    assert row["routing/wire_bytes_per_token"] == 4.0
    assert processes_of(output) == []


class Tells(Callback):
    """The second rank alone gets SIGUSR1 in the first step, twice."""

    def on_step(self, step: int, metrics: Any, groups: Any) -> bool:
        if step == 0 and os.environ["RANK"] == "1":
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
        return False


def told(overrides: list[str]) -> str:
    return train(load_recipe(TOY_RECIPE, overrides), world_size(), [Tells()])


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_signal_to_one_rank_stops_both(toy: Toy, recorded: Path, tmp_path: Path) -> None:
    given = toy.overrides(
        tmp_path / "run",
        f"debug.load_rollouts={recorded / 'rollouts'}",
        "parallel.tensor_model_parallel_size=2",
        "train.num_steps=4",
    )
    first, second = run_ranks(2, told, given, folder=tmp_path / "out")
    assert first == second
    assert first.startswith(
        "SIGUSR1: saved a checkpoint with 1 steps done; start again to continue"
    )
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0]
    assert latest_step(tmp_path / "run/checkpoints") == 1


@pytest.mark.release
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("rollout_tp", "layout"),
    [(1, "expert_model_parallel_size"), (2, "tensor_model_parallel_size")],
)
def test_two_ranks(rollout_tp: int, layout: str, toy: Toy, tmp_path: Path) -> None:
    """After the first step an engine is killed: all ranks send the weights again, to its successor."""
    output = tmp_path / "run"
    overrides = toy.overrides(
        output,
        "train.num_steps=4",
        f"parallel.{layout}=2",
        f"rollout.tensor_parallel_size={rollout_tp}",
    )
    process = subprocess.Popen(
        ["bash", "launch/torchrun.sh", str(TOY_RECIPE), *overrides],
        cwd=REPOSITORY,
        env=environment(NPROC="2", MRL_TEST_RUN=str(output)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not (output / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.02)
    servers = [p for p in psutil.Process(process.pid).children(recursive=True) if is_server(p)]
    for server in servers[-1:]:
        server.kill()
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, printed
    assert "starting another one" in printed
    engines = 2 // rollout_tp
    assert len(list((output / "logs").glob("engine_*.log"))) == engines
    rows = metrics(output)
    assert [row["step"] for row in rows] == list(range(4))
    assert sum(row["rollout/engine_restarts"] for row in rows) == 1.0
    for row in rows:
        assert row["mismatch/logprob_abs_max"] <= 1e-4
        assert row["routing/replay_coverage"] == 1.0
        # A byte for each of 4 layers, between two engines' ranks or from one to its pair.
        assert row["routing/wire_bytes_per_token"] == 4.0
    for step in range(4):
        file = output / f"rollouts/step_{step:06d}.jsonl"
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert [s["group_id"] for s in samples] == [i for i in range(4) for _ in range(4)]
        assert len({s["prompt_id"] for s in samples}) == 4
    assert processes_of(output) == []


@pytest.mark.release  # tests/launch/test_launch.py has the script, and test_refusals.py the line
def test_bad_input_under_torchrun_is_one_line_and_code_2(toy: Toy, tmp_path: Path) -> None:
    overrides = toy.overrides(tmp_path / "run", "parallel.tensor_model_parallel_size=3")
    done = subprocess.run(
        ["bash", "launch/torchrun.sh", str(TOY_RECIPE), *overrides],
        cwd=REPOSITORY,
        env=environment(NPROC="2"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "mrl: parallel: 2 ranks are not divisible by tensor 3 x context 1 x pipeline 1 = 3; start a "
        "multiple of 3 ranks or lower a size"
    ]
