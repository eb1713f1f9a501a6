"""Loops of the unmodified tinker-cookbook against a service: the model is a toy under a name that the
cookbook knows, and the data sets are local folders with the names of those of the hub."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.tinker.keys import Keys
from mrl.toy_model import write_toy_model
from tests.tinker.running import (
    LIMIT_S,
    needs_cookbook,
    sdk_environment,
    served,
    tinker_service,
)

pytestmark = [needs_cookbook, pytest.mark.timeout(900), pytest.mark.release]

NAME = "Qwen/Qwen3-8B-Base"
CHAT, MATH = "HuggingFaceH4/no_robots", "openai/gsm8k"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
---
"""


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the model and the data sets have the names by which the cookbook asks."""
    folder = tmp_path_factory.mktemp("cookbook")
    (folder / NAME).parent.mkdir(parents=True)
    write_toy_model(folder / NAME, seed=0, max_position_embeddings=2048)
    draw = random.Random(0)
    rows = [
        {"role": "user", "content": f"What is {a} + {b}?{SUFFIX}"}
        for a in range(8)
        for b in range(8)
    ]
    talks = [
        [row, {"role": "assistant", "content": f"\\boxed{{{draw.randrange(4)}}}"}] for row in rows
    ]
    write_rows(folder / CHAT / "train.jsonl", [{"messages": talk} for talk in talks])
    sums = [(a, b) for a in range(4) for b in range(3)]
    rows = [{"question": f"What is {a} + {b}?", "answer": f"#### {a + b}"} for a, b in sums]
    write_rows(folder / MATH / "main" / "train.jsonl", rows)
    (folder / MATH / "README.md").write_text(CARD)
    return folder


@pytest.fixture(scope="module")
def run(work: Path) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """A function that runs a recipe, and returns the rows of its metrics."""
    long = {"batch_invariant": True, "context_len": 1024, "max_total_tokens": 16384}
    service = tinker_service(work, work / NAME, rollout=long, tenants={"max_number": 16})
    own = sdk_environment(Keys(service.folder).add("ann"))
    environment = {**own, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    with served(service) as (url, _):

        def call(recipe: str, log: str = "", **keys: Any) -> list[dict[str, Any]]:
            folder = work / (log or recipe)
            asked = {
                "base_url": url, "model_name": NAME, "lora_rank": 8, "log_path": folder, **keys,
            }  # fmt: skip
            words = [f"{key}={value}" for key, value in asked.items()]
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", f"tinker_cookbook.recipes.{recipe}", *words],
                cwd=work, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
                check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]

        yield call


def test_sl_loop_is_resumed(run: Callable[..., list[dict[str, Any]]], work: Path) -> None:
    keys = {"batch_size": 4, "max_length": 256, "save_every": 2, "learning_rate": 1e-3}
    rows = run("sl_loop", log="resumed", max_steps=3, **keys)
    saved = work / "resumed" / "checkpoints.jsonl"
    first, *_ = saved.read_text().splitlines()
    assert json.loads(first)["batch"] == 2
    saved.write_text(first + "\n")  # as if the run had been stopped after its first checkpoint
    more = run("sl_loop", log="resumed", max_steps=3, **keys)
    again, third = more[-1], rows[2]
    assert [again["progress"], again["train_mean_nll"]] == [
        third["progress"], third["train_mean_nll"],
    ]  # fmt: skip


@pytest.mark.parametrize("loss", ["stable_reinforce", "gspo"])
def test_rl_loop(run: Callable[..., list[dict[str, Any]]], loss: str) -> None:
    """The toy gets no reward, so that the loop samples, scores, saves and takes no step; the program
    `trains` takes steps with the same data."""
    keys = {"batch_size": 4, "group_size": 8, "max_tokens": 16, "max_steps": 2, "save_every": 1}
    rows = run("rl_loop", log=loss, loss_fn=loss, **keys)
    assert [row["progress/batch"] for row in rows] == [0, 1]
    assert all(0 <= row["reward/total"] <= 1 for row in rows)
