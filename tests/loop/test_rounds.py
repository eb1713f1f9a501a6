"""Failures of rewards and environments in a round of dynamic sampling, a small part of its step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.collect.scoring import Scoring
from mrl.collect.task import share_scored
from mrl.config import ParallelConfig, Recipe, load_recipe
from mrl.errors import RunFailed
from mrl.run.rollouts import is_held
from parallel.dims import ParallelDims
from parallel.mesh import init_mesh
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.ranks import run_ranks
from tests.sample_groups import group

NAN = float("nan")


def recipe_of(toy: Toy, *more: str) -> Recipe:
    sizes = ("rollout.prompts_per_step=8", "rollout.samples_per_prompt=4")  # 5% are 1.6 samples
    return load_recipe(TOY_RECIPE, [*toy.overrides(Path("nowhere")), *sizes, *more])


def shared(recipe: Recipe, num_failed: int) -> tuple[int, str]:
    """A last round of one group, on the first of two engines -> groups on this rank, or the error."""
    mesh = init_mesh(ParallelDims.create(ParallelConfig(), 2), 0)
    own = [group([NAN, 1.0, 0.0, 1.0], 9)] if mesh.rank == 0 else []
    result = (own, num_failed if own else 0)
    task: Any = SimpleNamespace(finish=lambda: result)
    try:
        (one,) = share_scored(task, recipe, mesh)
        assert is_held(one) == (mesh.rank == 0)  # the others get its outline
        return 1, ""
    except RunFailed as error:
        return 0, str(error)


@pytest.mark.parametrize("num_failed", [1, 2])
def test_failures_of_a_round_are_a_share_of_the_whole_step(
    num_failed: int, toy: Toy, tmp_path: Path
) -> None:
    found = run_ranks(2, shared, recipe_of(toy), num_failed, folder=tmp_path)
    if num_failed == 1:
        assert found == [(1, ""), (1, "")]
    else:
        assert all("2 of 32 samples of this step" in error for _, error in found)


def test_an_engine_without_a_group_in_a_round_reports_no_failure_of_the_round_before(
    toy: Toy,
) -> None:
    scoring = Scoring(recipe_of(toy, "reward=null", "environment.name=guess_letter"), None)
    try:
        assert scoring.environments is not None
        scoring.environments.num_failed = 1
        scoring.begin_step()
        assert scoring.finish() == ([], 0)
    finally:
        scoring.close()
