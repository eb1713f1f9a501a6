"""Optimizer steps whose importance weights rest on few tokens are skipped, and many end the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.errors import ExitCode, RunFailed
from mrl.system.clock import Clock
from mrl.types import SampleGroup
from tests.loop.conftest import Toy
from tests.loop.stepped import collected
from tests.loop.test_guards import made_trainer
from tests.ranks import run_ranks


def spoil(groups: list[SampleGroup]) -> None:
    """Let one token have e^20 times the weight of the others."""
    sample = groups[0].samples[0]
    logprobs = sample.rollout_logprobs.clone()
    logprobs[sample.loss_mask.nonzero()[0]] -= 20.0
    groups[0].samples[0] = dataclasses.replace(sample, rollout_logprobs=logprobs)


def steps_in_a_row(overrides: list[str], spoilt: list[bool]) -> list[dict[str, Any]]:
    """Run one step for each of `spoilt` -> metrics, what moved, and the error."""
    trainer = made_trainer(overrides)
    found: list[dict[str, Any]] = []
    for is_spoilt in spoilt:
        before = [p.detach().clone() for p in trainer.policy.chunks[0].parameters()]
        groups = collected(trainer)
        if is_spoilt:
            spoil(groups)
        trainer.policy.onload()
        row: dict[str, Any] = {"error": "", "code": 0, "metrics": {}}
        try:
            row["metrics"] = trainer.learner.learn(
                trainer.step, groups, Clock(), lambda groups: None
            )
        except RunFailed as error:
            row |= {"error": str(error), "code": int(error.exit_code)}
        trainer.step += 1
        after = trainer.policy.chunks[0].parameters()
        row["same"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        row["schedule"] = trainer.policy.scheduler.num_steps
        row["state"] = trainer.learner.state_dict()["low_ess_steps"]
        found.append(row)
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.release)])
def test_steps_of_a_small_sample_size_are_skipped_and_many_in_a_row_end_the_run(
    toy: Toy, recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], ranks: int
) -> None:
    overrides = toy.overrides(
        tmp_path / "run",
        f"debug.load_rollouts={recorded / 'rollouts'}",
        "train.num_steps=4",
        "guards.min_ess=0.5",
        "guards.max_low_ess_steps=2",
    )
    pattern = [True, False, True, True]
    parts = run_ranks(ranks, steps_in_a_row, overrides, pattern, folder=tmp_path / "out")
    for rows in parts:
        assert all(rows[i]["same"] for i in (0, 2, 3))
        assert [row["schedule"] for row in rows] == [0, 1, 1, 1]
        assert [row["state"] for row in rows] == [1, 0, 1, 2]
        assert [row["code"] for row in rows] == [0, 0, 0, ExitCode.FAILED]
        low, good, *_ = (row["metrics"] for row in rows)
        assert low["guard/ess"] < 0.1
        assert low["train/low_ess_steps"] == 1
        assert low["train/nonfinite_steps"] == 0
        assert low["grad_norm"] == 0.0
        assert good["guard/ess"] == pytest.approx(good["mismatch/ess"], rel=1e-4)
        assert good["train/low_ess_steps"] == 0
        assert "2 optimizer step(s) in a row" in rows[3]["error"]
    said = " ".join(capfd.readouterr().out.split())
    assert "below guards.min_ess=0.5; this optimizer step is skipped" in said
