"""Trackers, speed and profiles: what a team looks at while a run goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.trackers.test_real_trackers import FOLDER, python
from tests.users.things import User, thing

TRACKER = """
import json
from mrl.trackers.base import Started

class Tracker:
    def __init__(self, run): self.file = run.folder / "mine.jsonl"
    @staticmethod
    def packages(config): return ()
    def start(self, run_id, next_step): return Started(run_id or "mine-1", next_step)
    def log(self, step, metrics, time_s):
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\\n")
    def log_samples(self, step, rows, time_s):
        (self.file.parent / f"samples_{step}.json").write_text(json.dumps(rows))
    def flush(self): pass
    def close(self, *, failed): pass
"""


def rows(user: User, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (user.folder / file).read_text().splitlines()]


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


@thing("I log to wandb, which is not installed.", is_long=False)
def log_without_the_package(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "logging=[jsonl, wandb]", code=2)
    assert "pip install 'mrl[wandb]'" in printed
    return printed.strip()


@thing("I mistype a tracker.", is_long=False)
def mistype_a_tracker(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "logging=[tensorbord]", code=2)
    assert "did you mean 'tensorboard'" in printed
    return printed.strip()


@thing("I log to a tracker of my own, and find every step and some samples there.")
def log_to_my_own(user: User) -> str:
    tracker = user.write("mine.py", TRACKER)
    user.train("run", "train.num_steps=2", f"logging.trackers=['{tracker}:Tracker']",
               "logging.samples_per_step=3")  # fmt: skip
    metrics = [numbers(row) for row in rows(user, "run/metrics.jsonl")]
    assert rows(user, "run/mine.jsonl") == metrics
    assert len(json.loads((user.folder / "run/samples_1.json").read_text())) == 3
    return f"{len(metrics)} steps, the same numbers as metrics.jsonl"


@thing(
    "I log to TensorBoard, wandb and MLflow without a network, and read the numbers back.",
    wall="Nothing can be logged where teams look.",
)
def log_to_three(user: User) -> str:
    if not FOLDER.is_dir():
        pytest.skip("make .venv/.trackers installs the trackers")
    trackers = "logging.trackers=[jsonl, tensorboard, wandb, mlflow]"
    keys = user.recipe("run", "train.num_steps=8", trackers, "logging.project=mine")
    done = python("-m", "mrl", "train", *keys, folder=user.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    read = python("-m", "tests.trackers.read_back", user.folder / "run", folder=user.folder)
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout.splitlines()[-1])
    expected = {
        str(row["step"]): {key: value for key, value in numbers(row).items() if key != "step"}
        for row in rows(user, "run/metrics.jsonl")
    }
    assert found["wandb"] == found["mlflow"] == expected
    for step, row in expected.items():  # TensorBoard has 32 bits
        assert found["tensorboard"][step] == pytest.approx(row, rel=1e-6)
    return f"{len(expected)} steps with {len(expected['0'])} numbers in each"


@thing("I add a tracker to a run that has begun; it gets the steps before it too.")
def add_a_tracker_later(user: User) -> str:
    user.train("run", "train.num_steps=1")
    tracker = user.write("mine.py", TRACKER)
    user.train("run", "train.num_steps=2", f"logging.trackers=['{tracker}:Tracker']")
    assert [row["step"] for row in rows(user, "run/mine.jsonl")] == [0, 1]
    return "both steps are there"


@thing("I want to know how fast a run is, and how many answers are cut off.")
def see_the_speed(user: User) -> str:
    printed = user.train("run", "train.num_steps=1")
    (row,) = rows(user, "run/metrics.jsonl")
    assert row["response_len/mean"] <= row["response_len/max"] <= 12
    assert 0 <= row["response_len/truncated"] <= 1
    assert row["throughput/step_tokens_per_s"] == row["tokens/train"] / row["time/step_s"]
    head = next(line for line in printed.splitlines() if line.split()[:1] == ["step"])
    assert {"longest", "tokens/s", "s/step", "time"} <= set(head.split())
    page = user.mrl("view", user.folder / "run")
    assert "view.html" in page
    return f"{row['throughput/step_tokens_per_s']:.0f} tokens/s"


@thing("I profile a step.")
def profile_a_step(user: User) -> str:
    user.train("run", "train.num_steps=2", "profile.steps=[1]")
    files = sorted(file.name for file in (user.folder / "run/profile/step_000001").iterdir())
    assert [name.split("_")[0] for name in files] == ["engine", "trainer"]
    return ", ".join(files)
