"""The proximal policies in the loop: what the clip is around, by the age of the tokens."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from mrl.config import load_recipe
from mrl.preflight import check
from mrl.run.folder import RunFolder, saved_step
from mrl.run.rollouts import load_groups, save_groups
from mrl.types import VersionSpan
from parallel.mesh import init_mesh
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.ranks import run_ranks

STEP = 4
AGES = (0, 1, 2, 4)


def aged(recorded: Path, folder: Path, age: int) -> Path:
    """The recorded samples of step 0, as if weights `age` versions older than STEP had sampled them."""
    groups = load_groups(saved_step(recorded / "rollouts", 0))
    for group in groups:
        group.samples = [
            dataclasses.replace(
                sample,
                routing=None,
                rollout_logprobs=sample.rollout_logprobs - 0.5 * sample.loss_mask,
                weight_versions=tuple(
                    VersionSpan(STEP - age, span.start, span.end) for span in sample.weight_versions
                ),
            )
            for sample in group.samples
        ]
    folder.mkdir(parents=True)
    save_groups(saved_step(folder, STEP), groups)
    return folder


def one_update(toy: Toy, recorded: Path, scratch: Path) -> dict[str, dict[str, float]]:
    """Metrics of step STEP under the initial weights: engine and trainer differ by 0.5 a token."""
    from mrl.trainer import Trainer

    rows, mesh = {}, None
    for name, age in [*(("a3po", age) for age in AGES), ("decoupled_ppo", 2)]:
        key = f"{name}/{age}"
        saved = aged(recorded, scratch / key / "rollouts", age)
        more = (f"debug.load_rollouts={saved}", f"algorithm.name={name}", "moe.routing_replay=off")
        diagnosis = ("diagnosis.save_tokens_every=0", "diagnosis.decompose_every=0")
        steps = f"train.num_steps={STEP + 1}"
        overrides = toy.overrides(scratch / key / "run", steps, *more, *diagnosis)
        recipe = load_recipe(TOY_RECIPE, overrides)
        plan = check(recipe, 1, saved_steps=range(STEP, STEP + 1))
        folder = RunFolder(recipe.output_dir)
        folder.open(recipe)
        mesh = mesh or init_mesh(plan.dims, recipe.seed)
        trainer = Trainer(plan, mesh, folder)
        trainer.step = STEP
        rows[key] = trainer.run_step()
    return rows


@pytest.fixture(scope="module")
def rows(toy: Toy, recorded: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("proximal")
    return run_ranks(1, one_update, toy, recorded, folder / "runs", folder=folder / "out")[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("age", AGES)
def test_a3po_goes_from_the_rollout_towards_the_present_policy(age: int, rows) -> None:
    """rollout + alpha (logp - rollout), alpha = 1 - 1/age: logp - rollout is 0.5 everywhere."""
    row, alpha = rows[f"a3po/{age}"], 1 - 1 / max(age, 1)
    assert row["staleness/mean"] == age
    assert "time/logprob_s" not in row  # nothing is computed for it
    assert math.log(row["ratio/mean"]) == pytest.approx(0.5 * (1 - alpha), abs=1e-4)
    assert math.log(row["importance/mean"]) == pytest.approx(0.5 * alpha, abs=1e-4)


@pytest.mark.timeout(300)
def test_decoupled_ppo_computes_the_policy_before_the_update(rows) -> None:
    row = rows["decoupled_ppo/2"]
    assert row["time/logprob_s"] > 0
    assert row["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert math.log(row["importance/mean"]) == pytest.approx(0.5, abs=1e-4)
