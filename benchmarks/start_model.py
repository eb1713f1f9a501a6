"""Write the model that benchmarks and studies start from, after a recipe's supervised steps.

`python -m benchmarks.start_model MODEL SCRATCH RECIPE` writes a toy model of the default shape.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from mrl.config import load_recipe
from mrl.learn.sft import run_sft
from mrl.preflight import check
from mrl.toy_model import write_toy_model
from parallel import prepare
from parallel.mesh import init_mesh
from parallel.policy import Policy


def write_start(model: Path, scratch: Path, recipe_file: Path, shape: dict[str, Any]) -> None:
    """Write a toy model after the supervised steps of a recipe to `model`, whole or not at all.

    `shape` holds arguments of `write_toy_model`. The process becomes a rank, so it must be a new one.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    write_toy_model(scratch / "model", **shape)
    write_after_sft(model, scratch, recipe_file)


def write_after_sft(
    model: Path, scratch: Path, recipe_file: Path, more: Sequence[str] = ()
) -> None:
    """Move the model SCRATCH/model, after the supervised steps of a recipe, to `model`.

    `more` are overrides of the recipe. The weights become one file in float32. The process becomes a
    rank, so it must be a new one.
    """
    keys = [f"model.path={scratch / 'model'}", f"output_dir={scratch}/run"]
    recipe = load_recipe(recipe_file, [*keys, *more])
    plan = check(recipe, 1)
    assert recipe.sft is not None
    prepare()
    mesh = init_mesh(plan.dims, recipe.seed)
    policy = Policy(
        plan.model, mesh, recipe.model, recipe.optimizer, recompute=False, temperature=1.0
    )
    run_sft(plan.sft_examples, recipe.sft, recipe, policy, mesh)
    weights = {
        name: tensor.clone()
        for bucket in policy.export(0, 1 << 30)
        for name, tensor in bucket.tensors
    }
    for file in (scratch / "model").glob("model*.safetensors*"):
        file.unlink()
    save_file(weights, scratch / "model/model.safetensors", metadata={"format": "pt"})
    (scratch / "model").rename(model)


if __name__ == "__main__":
    write_start(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), {})
