"""A reward that cannot be started on one rank: all ranks fail, and none leaves a process behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import psutil
import torch.distributed as dist

from mrl.config import load_recipe
from mrl.engine_pool.local import make_local_collector
from mrl.errors import InputError
from mrl.preflight import check
from mrl.run.folder import RunFolder
from parallel.mesh import init_mesh
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.ranks import run_ranks


def collected(model: str, output: str) -> list[str]:
    """Return the error of this rank, and the processes that are left."""
    overrides = [f"model.path={model}", f"output_dir={output}"]
    plan = check(load_recipe(TOY_RECIPE, overrides), 2)
    mesh = init_mesh(plan.dims, 0)
    if dist.get_rank() == 1:
        recipe = plan.recipe.model_copy(update={"reward": "nobody"})
        plan = dataclasses.replace(plan, recipe=recipe)
    try:
        make_local_collector(plan, mesh, RunFolder(output))
        return []
    except InputError as error:
        left = [each.name() for each in psutil.Process().children(recursive=True)]
        return [str(error), *left]


def test_a_reward_that_one_rank_cannot_start_fails_on_all_and_leaves_nothing(
    toy: Toy, tmp_path: Path
) -> None:
    first, second = run_ranks(
        2, collected, str(toy.model), str(tmp_path / "run"), folder=tmp_path / "ranks"
    )
    assert len(first) == len(second) == 1
    assert first[0] == f"rank 1: {second[0]}"
    assert "nobody" in first[0]
