"""TensorBoard, wandb and MLflow hold what metrics.jsonl holds, after a kill and a resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from mrl.toy_model import write_toy_model
from tests.loop.conftest import COMMAND_TIMEOUT_S, REPOSITORY, TOY_RECIPE, Toy

FOLDER = Path(sys.prefix) / "trackers"
KILLER = '''
import os, signal

class Tracker:
    """Kills the run in step 5, in the middle of a step after a checkpoint."""
    def __init__(self, run): self.file = run.folder / "killed"
    @staticmethod
    def packages(config): return ()
    def start(self, run_id, next_step):
        from mrl.trackers.base import Started
        return Started("1", next_step)
    def log(self, step, metrics, time_s):
        if step == 5 and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    def log_samples(self, step, rows, time_s): pass
    def flush(self): pass
    def close(self, *, failed): pass
'''
NAMES = ("tensorboard", "wandb", "mlflow")


def python(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a new Python, which finds the trackers' packages, in `folder`."""
    path = os.pathsep.join([str(REPOSITORY), str(FOLDER)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S,
        check=False,
    )  # fmt: skip


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.skipif(not FOLDER.is_dir(), reason="make .venv/.trackers installs the trackers")
def test_files_of_the_trackers_equal_metrics_jsonl_after_a_kill_and_a_resume(tmp_path) -> None:
    write_toy_model(tmp_path / "toy")
    (tmp_path / "killer.py").write_text(KILLER)
    run = tmp_path / "run"
    given = Toy(tmp_path / "toy").overrides(
        run, "train.num_steps=8", "checkpoint.save_every=2", "checkpoint.async_save=false",
        "logging.project=mine", "logging.samples_every=3",
        f"data.path={REPOSITORY / 'launch/recipes/data/first_char.jsonl'}",
    )  # fmt: skip
    trackers = "jsonl, tensorboard, wandb, mlflow"
    train = ["-m", "mrl", "train", TOY_RECIPE, *given]
    killed = python(*train, f"logging.trackers=[{trackers}, killer.py:Tracker]", folder=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    ids = {name: each["run_id"] for name, each in state(run).items()}
    resumed = python(*train, f"logging.trackers=[{trackers}]", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "warning" not in resumed.stdout + resumed.stderr
    assert {name: state(run)[name]["run_id"] for name in ids} == ids

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(8))
    expected = {
        str(row["step"]): {k: v for k, v in row.items() if k != "step" and v is not None}
        for row in rows
    }
    read = python("-m", "tests.trackers.read_back", run, folder=tmp_path)
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout.splitlines()[-1])
    single = {s: {k: float(numpy.float32(v)) for k, v in r.items()} for s, r in expected.items()}
    assert found["tensorboard"] == single  # TensorBoard has 32 bits
    assert found["wandb"] == expected
    assert found["mlflow"] == expected
    assert found["samples"] == {name: [0, 3, 6] for name in NAMES}


def state(run: Path) -> dict[str, dict]:
    found = json.loads((run / "trackers.json").read_text())
    return {name: each for name, each in found.items() if name != "run_folder"}
