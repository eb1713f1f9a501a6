"""Check the number of ranks, and tell the user how to start a recipe that needs another number."""

from __future__ import annotations

import math
import os
from typing import Literal

from mrl.config import Recipe
from mrl.errors import InputError
from mrl.preflight.roles import roles_of, trainer_dims

GPUS_PER_NODE = 8
"""Number of GPUs of a typical node. If a recipe needs more ranks, the error message suggests mrl's
SLURM script."""


def check_ranks(recipe: Recipe, world: int, command: Literal["check", "train"]) -> None:
    """Raise InputError if `world` ranks cannot run the recipe.

    The message also says how to run `mrl check` or `mrl train` (`command`) with a suitable number
    of ranks. This hint is left out under torchrun, and if the number of ranks is not the cause.
    """
    try:
        roles = roles_of(recipe, world)
        trainer_dims(recipe, roles)
        if recipe.debug.load_rollouts is None:
            roles.engine_layout(recipe.rollout)
    except InputError as error:
        fewest, apart = fewest_ranks(recipe), recipe.rollout.placement == "disaggregated"
        is_unknown = apart and recipe.rollout.num_ranks is None
        if is_unknown or (not apart and world % fewest == 0) or "WORLD_SIZE" in os.environ:
            raise
        raise InputError(f"{error}. {_hint(fewest, command, is_multiple=not apart)}") from None


def fewest_ranks(recipe: Recipe) -> int:
    """Return the smallest number of ranks on which a recipe can run.

    A colocated recipe can run on every multiple of this number.
    """
    layout = recipe.parallel
    pipeline = layout.pipeline_model_parallel_size
    dense = layout.tensor_model_parallel_size * layout.context_parallel_size * pipeline
    expert = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size * pipeline
    if recipe.rollout.placement == "disaggregated":
        return math.lcm(dense, expert) + (recipe.rollout.num_ranks or 0)
    has_engine = recipe.debug.load_rollouts is None
    return math.lcm(dense, expert, recipe.rollout.tensor_parallel_size if has_engine else 1)


def _hint(ranks: int, command: str, *, is_multiple: bool) -> str:
    if command == "check":
        return (
            f"This is one process: `mrl check RECIPE --gpus {ranks}` checks the recipe for {ranks} "
            "ranks, also on a login node without a GPU"
        )
    start = f"python -m mrl.launch --nproc-per-node {ranks} -m mrl train RECIPE"
    if ranks > GPUS_PER_NODE:
        start = "sbatch launch/slurm/train.sbatch RECIPE OUTPUT_DIR"
    number = f"a multiple of {ranks}" if is_multiple else f"at least {ranks}"
    return f"This is one process; the recipe needs {number} ranks: {start}"
