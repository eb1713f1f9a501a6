"""`mrl check --plan`: what a recipe costs on GPUs, from formulas, before there are any."""

from __future__ import annotations

import math
from pathlib import Path

from mrl import console
from mrl.config import Recipe
from mrl.errors import InputError
from parallel.dims import ParallelDims
from parallel.groups import world_size
from parallel.hf_config import has_weights, read_config
from parallel.scaling.cost import Hardware, find_hardware
from parallel.scaling.report import tables, verdict
from parallel.scaling.shape import ModelShape, read_shape
from parallel.scaling.workload import Workload, recipe_workload

DEFAULT_PROMPT_LEN = 512


def show_plan(recipe: Recipe, gpus: int | None, gpu: str | None, prompt_len: int | None) -> None:
    """Print the plan; the last line says whether it fits. Raises InputError.

    A folder with weights is checked as before a start; of one with only config.json, the sizes are.
    """
    world = world_size() if gpus is None else gpus
    if world < 1:
        raise InputError(f"--gpus: got {world}, expected at least 1")
    hardware = find_hardware(gpu or "h100")
    folder = Path(recipe.model.path)
    config = read_config(folder)
    shape = read_shape(config)
    dims = ParallelDims.create(recipe.parallel, world)
    dims.check_model(shape.sizes)
    context_len = recipe.rollout.context_len or config.get("max_position_embeddings")
    work = plan_workload(recipe, shape, world, prompt_len, context_len)
    if has_weights(folder):
        from mrl.preflight import check

        console.plan(check(recipe, world).rows())
    else:
        console.plan([("model", f"{folder}: config.json only, so nothing but sizes was checked"),
                      ("layout", dims.describe())])  # fmt: skip
    print(f"\n{assumptions(dims, work, hardware)}")
    for table in tables(shape, dims, work, hardware):
        console.table(table.title, table.header, table.rows)
    print(f"\n{verdict(shape, dims, work, hardware)}")


def assumptions(dims: ParallelDims, work: Workload, gpu: Hardware) -> str:
    """What the tables are about; the lines above them are about this machine."""
    dtype = "bfloat16" if work.weight_bytes == 2 else "float32"
    return (
        f"Below: {dims.world} x {gpu.name}, weights in {dtype}, prompts of {work.prompt_len} tokens "
        f"(an assumption: --prompt-len), every response as long as allowed, {work.response_len}."
    )


def plan_workload(
    recipe: Recipe, shape: ModelShape, world: int, prompt_len: int | None, context_len: int | None
) -> Workload:
    """The recipe's work with prompts of `prompt_len` tokens. Raises InputError where it cannot be."""
    room = (context_len or math.inf) - recipe.rollout.max_response_len
    asked = int(min(DEFAULT_PROMPT_LEN, max(room, 1))) if prompt_len is None else prompt_len
    if asked < 1:
        raise InputError(f"--prompt-len: got {asked}, expected at least 1")
    if asked > room:
        raise InputError(
            f"--prompt-len: {asked} tokens and rollout.max_response_len "
            f"{recipe.rollout.max_response_len} are more than the context of {context_len}; lower one"
        )
    tp = recipe.rollout.tensor_parallel_size
    for count, what in ((world, "GPUs"), (shape.kv_heads, "key/value heads")):
        if count % tp:
            raise InputError(
                f"rollout.tensor_parallel_size: {count} {what} are not divisible by {tp} "
                f"({count} = {count // tp} x {tp} + {count % tp}); change it"
            )
    return recipe_workload(recipe, asked)
