"""Optimizer steps that are not finite are skipped and counted, and too many in a row end the run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms import nll
from mrl.config import AlgorithmConfig
from mrl.errors import ExitCode, NotFinite
from mrl.learn.sft import run_sft
from mrl.types import LossOutput, MicroBatch
from tests.loop.conftest import Toy
from tests.loop.test_guards import Poisoned, made_trainer, spoilt_loss
from tests.ranks import run_ranks

LR = "optimizer.lr_warmup_steps=8"  # the schedule moves


def steps_in_a_row(overrides: list[str], poisoned: list[bool]) -> list[dict[str, Any]]:
    """Run one step for each of `poisoned` -> metrics, what moved, and the error of the last."""
    algorithm = Poisoned("nothing")
    trainer = made_trainer(overrides, algorithm=algorithm)
    found: list[dict[str, Any]] = []
    for is_poisoned in poisoned:
        algorithm.what = "log-probs" if is_poisoned else "nothing"
        before = [p.detach().clone() for p in trainer.policy.chunks[0].parameters()]
        row: dict[str, Any] = {"error": "", "code": 0, "metrics": {}}
        try:
            row["metrics"] = trainer.run_step()
        except NotFinite as error:
            row |= {"error": str(error), "code": int(error.exit_code)}
        after = trainer.policy.chunks[0].parameters()
        row["same"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        row["state"] = trainer.learner.state_dict()["nonfinite_steps"]
        row["schedule"] = trainer.policy.scheduler.num_steps
        found.append(row)
    return found


def test_steps_that_are_not_finite_are_skipped_and_three_in_a_row_end_the_run(
    toy: Toy, recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = f"debug.load_rollouts={recorded / 'rollouts'}"
    more = ("train.num_steps=4", "train.num_steps_per_rollout=2", LR)
    overrides = toy.overrides(tmp_path / "run", saved, *more)
    pattern = [True, False, True, True]
    (rows,) = run_ranks(1, steps_in_a_row, overrides, pattern, folder=tmp_path / "out")
    # Samples 4 and 6 are in the first of two mini-batches: the second one is trained.
    counts = [row["metrics"]["train/nonfinite_steps"] for row in rows]
    assert counts == [1, 0, 1, 1]
    assert [row["schedule"] for row in rows] == [1, 3, 4, 5]  # no step for what was skipped
    assert [row["same"] for row in rows] == [True, False, False, False]  # warm-up starts at 0
    assert not any(row["error"] for row in rows)
    assert all(row["metrics"]["loss/policy"] == row["metrics"]["loss/policy"] for row in rows)
    said = " ".join(capfd.readouterr().out.split())
    assert "step 0: gradients are not finite in samples 4, 6 (counted from 0" in said
    assert "of the policy is skipped and changes nothing, 1 in a row (guards.max_nonfinite_" in said
    overrides = toy.overrides(tmp_path / "other", saved, "train.num_steps=4", LR)
    (rows,) = run_ranks(1, steps_in_a_row, overrides, [True] * 3, folder=tmp_path / "out")
    assert all(row["same"] and row["schedule"] == 0 for row in rows)
    assert [row["state"] for row in rows] == [[1, 0], [2, 0], [3, 0]]
    assert [row["code"] for row in rows] == [0, 0, ExitCode.NOT_FINITE]
    assert (
        "3 optimizer step(s) of the policy in a row were not finite and changed nothing"
        in rows[2]["error"]
    )
    assert rows[1]["metrics"]["grad_norm"] == 0.0


def sft_with_bad_rows(overrides: list[str]) -> dict[str, Any]:
    """SFT whose second step is not finite -> the weights' bits after each step that was taken."""
    trainer = made_trainer(overrides)
    plan, policy, steps = trainer.plan, trainer.policy, []
    whole, bad, sft = nll.loss, spoilt_loss(nll.loss), plan.recipe.sft
    assert sft is not None

    def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
        return (bad if len(steps) == 1 else whole)(logprobs, batch, config)

    def train_step(*args: Any) -> Any:
        try:
            return type(policy).train_step(policy, *args)
        finally:
            steps.append([p.detach().clone() for p in policy.chunks[0].parameters()])

    nll.loss, policy.train_step = loss, train_step
    run_sft(plan.sft_examples, sft, plan.recipe, policy, trainer.mesh)
    return {"moved": [not all(map(torch.equal, a, b)) for a, b in pairwise(steps)]}


@pytest.mark.release
def test_sft_skips_a_step_and_names_its_rows(
    toy: Toy, recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sft.jsonl"
    rows = [{"prompt": f"{letter} b", "completion": "c d e"} for letter in "abcdefgh"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = (f"sft.path={file}", "sft.num_steps=3", "sft.batch_size=8", "sft.lr=1e-3")
    saved = f"debug.load_rollouts={recorded / 'rollouts'}"
    overrides = toy.overrides(tmp_path / "run", saved, "train.num_steps=4", *keys)
    (found,) = run_ranks(1, sft_with_bad_rows, overrides, folder=tmp_path / "out")
    assert found["moved"] == [False, True]
    said = " ".join(capfd.readouterr().out.split())
    assert "step 1: gradients are not finite in the rows " in said
    assert f"{file.name}:" in said
    assert "of SFT is skipped" in said
