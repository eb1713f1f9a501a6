"""`mrl check --plan` predicts with formulas what a recipe costs on GPUs, without needing a GPU.

Without `--plan`, `mrl check` applies the same formulas to the GPUs of this machine, and refuses a
recipe that does not fit.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from mrl.commands.placement_table import measured_tables, planned_tables
from mrl.config import Recipe
from mrl.engines.sglang.arguments import check_server_args
from mrl.errors import InputError
from mrl.planner.adapter import count_adapter
from mrl.planner.hardware import HARDWARE, Hardware, find_hardware
from mrl.planner.report import tables
from mrl.planner.shape import ModelShape, read_shape
from mrl.planner.verdict import Verdict, verdict
from mrl.planner.workload import Workload, recipe_workload
from mrl.preflight.engine_layout import check_engine_sizes
from mrl.preflight.lora import check_lora
from mrl.preflight.moe import check_moe
from mrl.preflight.mtp import planned_mtp
from mrl.preflight.optimizer import check_optimizer
from mrl.preflight.roles import roles_of
from mrl.run import console
from parallel.architectures import find_architecture
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel, has_weights, read_config
from parallel.mesh import world_size
from parallel.options.read import read_options

DEFAULT_PROMPT_LEN = 512
PINNED_LIMIT = re.compile(r"(?:^|,)\s*pinned_max_round_threshold_mb:(\d+)")


def show_plan(
    recipe: Recipe,
    gpus: int | None,
    gpu: str | None,
    prompt_len: int | None,
    host_memory_gb: float | None = None,
    *,
    response_len: int | None = None,
    measured: Sequence[Path] = (),
) -> None:
    """Print the plan; its last line says that the recipe fits.

    The arguments are those of `mrl check --plan`; None takes the default. `response_len` is the
    mean number of tokens of a response. `measured` are folders of runs, whose measured times
    replace the estimated times. If the model folder has weights, the recipe is checked in the same
    way as at the start of a run. If the folder has only config.json, only sizes and options are
    checked.

    Raises InputError if the recipe is not valid, or if it does not fit; the message then shows the
    arithmetic.
    """
    world = world_size() if gpus is None else gpus
    if world < 1:
        raise InputError(f"--gpus: got {world}, expected at least 1")
    hardware = find_hardware(gpu or "h100")
    if host_memory_gb is not None:
        if not 0 < host_memory_gb < math.inf:
            raise InputError(
                f"--host-memory: got {host_memory_gb:g}, expected a finite number of gigabytes above 0"
            )
        hardware = dataclasses.replace(hardware, host_memory_bytes=int(host_memory_gb * 1e9))
    folder = Path(recipe.model.path)
    try:
        roles = roles_of(recipe, world)
        ParallelDims.create(recipe.parallel, roles.num_trainers)
    except InputError as error:
        hint = "" if gpus else f"; this plan is for {world} GPU(s), --gpus N makes it for more"
        raise InputError(f"{error}{hint}") from None
    shape, dims, work = read_plan(recipe, world, prompt_len)
    if has_weights(folder):
        from mrl.preflight import check

        console.pairs(check(recipe, world).rows())
    else:
        checked = "config.json only, so only sizes and options were checked"
        apart = [("roles", roles.describe())] if roles.num_rollout else []
        adapted = [("lora", shape.adapter.adapter.describe())] if shape.adapter else []
        console.pairs(
            [("model", f"{folder}: {checked}"), *adapted, ("layout", dims.describe()), *apart]
        )
    print(f"\n{assumptions(dims, work, hardware)}")
    shown, waits = tables(shape, dims, work, hardware), ""
    is_apart = recipe.rollout.placement == "disaggregated"
    if measured:
        more, waits = measured_tables(measured, recipe.asynchronous if is_apart else None)
        shown += more
    elif is_apart:
        more, waits = planned_tables(recipe, shape, dims, work, hardware, response_len)
        shown += more
    for table in shown:
        console.table(table.title, table.header, table.rows)
    if waits:
        print(f"\n{waits}")
    print(f"\n{accepted(verdict(shape, dims, work, hardware))}")


def check_memory(recipe: Recipe, world: int) -> str | None:
    """Return the plan's verdict for the GPUs of this machine; None if this machine has no GPU.

    Raises InputError if the recipe does not fit into the memory of the GPUs or of the host.
    """
    if not torch.cuda.is_available():
        return None
    found = verdict(*read_plan(recipe, world, None), this_machine(world))
    if not found.runs:
        raise InputError(
            f"memory plan: {found.text}. These are estimates: mrl check --ignore-memory and "
            "IGNORE_MEMORY=1 launch/torchrun.sh accept the recipe nevertheless"
        )
    return f"{found.text} (by formulas: mrl check --plan lists them)"


def this_machine(world: int) -> Hardware:
    """Return the hardware of this machine: GPU name and memory, GPUs per node, and host memory.

    The speeds are those of the known GPU with the most similar memory; the verdict does not use
    speeds.
    """
    properties = torch.cuda.get_device_properties(0)
    nearest = min(
        HARDWARE.values(), key=lambda gpu: abs(gpu.memory_bytes - properties.total_memory)
    )
    return dataclasses.replace(
        nearest,
        name=properties.name,
        memory_bytes=properties.total_memory,
        gpus_per_node=min(world, torch.cuda.device_count()),
        host_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def accepted(found: Verdict) -> str:
    """Return the verdict's text. Raises InputError with this text if the layout cannot run or fit."""
    if not found.runs:
        raise InputError(f"memory plan: {found.text}")
    return found.text


def read_plan(
    recipe: Recipe, world: int, prompt_len: int | None
) -> tuple[ModelShape, ParallelDims, Workload]:
    """Return the model's shape, the layout and the workload of a recipe on `world` GPUs. Raises
    InputError if the recipe is not valid on that many GPUs."""
    read_options(recipe.megatron)  # names and types only; the other checks need the GPUs
    if recipe.rollout.engine == "sglang":
        check_server_args(recipe.rollout.server_args)
    config = read_config(Path(recipe.model.path))
    model = HfModel(
        Path(recipe.model.path), config, find_architecture(config, recipe.model.architecture)
    )
    model = planned_mtp(recipe, model)
    shape = read_shape(config, model.architecture)
    check_moe(recipe, model)
    check_optimizer(recipe)
    if adapter := check_lora(recipe, model):
        shape = dataclasses.replace(shape, adapter=count_adapter(model, adapter))
    trainers = roles_of(recipe, world).num_trainers
    dims = ParallelDims.create(recipe.parallel, trainers, fp8=bool(recipe.megatron.get("fp8")))
    dims.check_model(shape.sizes)
    context_len = recipe.rollout.context_len or config.get("max_position_embeddings")
    return shape, dims, plan_workload(recipe, shape, world, prompt_len, context_len)


def assumptions(dims: ParallelDims, work: Workload, gpu: Hardware) -> str:
    """Return the line above the tables that says what the tables assume."""
    dtype = "bfloat16" if work.weight_bytes == 2 else "float32"
    return (
        f"Below: {dims.world + work.rollout_ranks} x {gpu.name}, weights in {dtype}, prompts of "
        f"{work.prompt_len} tokens (an assumption: --prompt-len), every response as long as "
        f"allowed, {work.response_len}."
    )


def exact_pinned() -> int | None:
    """Return the size in bytes above which torch allocates pinned buffers without rounding them up.

    The size is read from torch's environment variables (`pinned_max_round_threshold_mb`). If they
    do not set it, the result is None, and torch rounds all pinned buffers up to a power of two.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if found := PINNED_LIMIT.search(os.environ.get(name, "")):
            return int(found[1]) << 20
    return None


def plan_workload(
    recipe: Recipe, shape: ModelShape, world: int, prompt_len: int | None, context_len: int | None
) -> Workload:
    """Return the recipe's workload with prompts of `prompt_len` tokens.

    If `prompt_len` is None, it is DEFAULT_PROMPT_LEN, or less if the context is shorter. Raises
    InputError if prompt and response do not fit into the context, or if the engine's layout does
    not fit the GPUs or the model.
    """
    response_len = recipe.rollout.max_response_len
    room = (context_len or math.inf) - response_len
    if room < 1:
        raise InputError(
            f"rollout.max_response_len {response_len} leaves no room for a prompt in the context of "
            f"{context_len}; lower it, or raise rollout.context_len"
        )
    asked = int(min(DEFAULT_PROMPT_LEN, room)) if prompt_len is None else prompt_len
    if asked < 1:
        raise InputError(f"--prompt-len: got {asked}, expected at least 1")
    if asked > room:
        raise InputError(
            f"--prompt-len: {asked} tokens and rollout.max_response_len {response_len} are more "
            f"than the context of {context_len}; lower one"
        )
    tp = recipe.rollout.tensor_parallel_size
    if recipe.rollout.placement == "colocated" and world % tp:
        raise InputError(
            f"rollout.tensor_parallel_size: {world} GPUs are not divisible by {tp} "
            f"({world} = {world // tp} x {tp} + {world % tp}); change it"
        )
    work = recipe_workload(recipe, shape, asked, exact_pinned())
    check_engine_sizes(recipe.rollout, shape.sizes)
    return work
