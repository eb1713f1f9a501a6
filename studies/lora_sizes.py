"""The tables of docs/lora.md, how large adapters are and how many GPUs train them, are made here.

    python -m studies.lora_sizes

They come from the formulas of `mrl check --plan` and need no GPU and no weights. A number of GPUs is
the smallest for which some layout fits; the search tries the sizes of `layouts`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.scaling import published
from mrl.commands.scaling_plan import plan_workload
from mrl.config import LoraConfig, load_recipe
from mrl.config.adapter import Experts
from mrl.errors import InputError
from mrl.planner.adapter import adapted_shape
from mrl.planner.hardware import HARDWARE
from mrl.planner.memory import trainer_rows
from mrl.planner.roles import all_phases
from mrl.planner.rows import total
from mrl.planner.shape import ModelShape
from mrl.planner.stages import stages
from mrl.planner.state import ADAM_MOMENTS
from mrl.planner.units import count, size
from mrl.planner.verdict import verdict
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.lora.rules import read_adapter

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/lora.md"
BEGIN, END = "<!-- tables: python -m studies.lora_sizes -->\n", "<!-- end of tables -->\n"
RANK = 32
GPU = HARDWARE["h100"]
RECIPE = ROOT / "launch/recipes/qwen3_30b_a3b_lora_2x80gb.yaml"
MODELS = {
    "Qwen3-30B-A3B": "qwen3_30b_a3b",
    "Qwen3-235B-A22B": "qwen3_235b_a22b",
    "Mixtral-8x7B": "mixtral_8x7b",
    "DeepSeek-V3": "deepseek_v3",
}
TRAINED: dict[str, Experts | None] = {
    "attention": "none",
    "attention, `shared_outer`": "shared_outer",
    "attention, `per_expert`": "per_expert",
    "all weights": None,
}
LARGEST_WORLD = 1024
Fits = Callable[[ModelShape, ParallelDims, Workload], bool]


def trained_shape(model: HfModel, experts: Experts | None) -> ModelShape:
    """Return the model with an adapter of its attention and these matrices of experts, or whole."""
    lora = None if experts is None else LoraConfig(rank=RANK, experts=experts)
    return adapted_shape(model, lora and read_adapter(lora, model))


def workload(shape: ModelShape) -> Workload:
    """Return the work of the shipped LoRA recipe; where all weights are trained, with all state on the
    GPUs and TransformerEngine's layers."""
    work = plan_workload(load_recipe(RECIPE, []), shape, 2, None, None)
    return work if shape.adapter else dataclasses.replace(work, lora=None, native=False)


def worlds(shape: ModelShape, work: Workload) -> Iterator[int]:
    """Yield numbers of GPUs: all of a node, then whole nodes, from eight of these on four at a time.

    Those are left out on which the weights and what training keeps could not be even if they were
    shared out without a copy.
    """
    trained = shape.adapter.num_parameters if shape.adapter else shape.num_parameters
    state = work.state.gradient_bytes + 4 + 4 * ADAM_MOMENTS
    least = work.weight_bytes * shape.num_parameters + state * trained
    for world in (*range(1, 9), *range(16, 65, 8), *range(96, LARGEST_WORLD + 1, 32)):
        if least <= world * GPU.memory_bytes:
            yield world


def layouts(shape: ModelShape, world: int) -> Iterator[ParallelDims]:
    """Yield layouts of tensor parallelism in a node, expert and pipeline parallelism, whose last stage
    has fewer layers where they do not divide."""
    for pp in (p for p in range(1, min(world, shape.num_layers) + 1) if world % p == 0):
        each = -(-shape.num_layers // pp)
        last = shape.num_layers - each * (pp - 1)
        if last < 1:
            continue
        for tp, ep in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64, 128, 256)):
            if world % (tp * pp) or world % (ep * pp):
                continue
            uneven = last if last != each else None
            dims = ParallelDims(world, tp, pp, 1, 1, ep, 1, last_layers=uneven)
            try:
                dims.check_model(shape.sizes)
            except InputError:
                continue
            yield dims


def holds_state(shape: ModelShape, dims: ParallelDims, work: Workload) -> bool:
    """Tell whether weights, gradients and optimizer state alone fit, which is quickly counted."""
    return all(
        total(trainer_rows(shape, stage, dims, work)) <= GPU.memory_bytes
        for stage in stages(shape, dims)
    )


def holds_trainer(shape: ModelShape, dims: ParallelDims, work: Workload) -> bool:
    """Tell whether the GPUs hold the trainer, the engines being on others."""
    apart = dataclasses.replace(work, rollout_ranks=8, engine_tp=8, staged_versions=1)
    phases = all_phases(shape, dims, apart, GPU)
    return all(p.device_bytes <= GPU.memory_bytes for p in phases if p.role == "trainer")


def holds_both(shape: ModelShape, dims: ParallelDims, work: Workload) -> bool:
    """Tell whether trainer and engines fit on the same GPUs in turns, with the smallest engines that
    have room for a sequence."""
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        if dims.world % ranks == 0:
            made = dataclasses.replace(work, engine_tp=ranks)
            if shape.adapter and ranks > GPU.gpus_per_node:  # it serves no adapter
                made = dataclasses.replace(made, lora="merged")
            if verdict(shape, dims, made, GPU).runs:
                return True
    return False


def smallest(shape: ModelShape, fits: Fits) -> ParallelDims | None:
    """Return the first layout on the smallest number of GPUs on which the model fits."""
    work = workload(shape)
    for world in worlds(shape, work):
        for dims in layouts(shape, world):
            if holds_state(shape, dims, work) and fits(shape, dims, work):
                return dims
    return None


def describe(dims: ParallelDims | None) -> str:
    """Return the number of GPUs with the layout: `2 (EP2)`."""
    if dims is None:
        return f"more than {LARGEST_WORLD}"
    sizes = (("TP", dims.tp), ("PP", dims.pp), ("EP", dims.ep))
    text = " ".join(f"{name}{ranks}" for name, ranks in sizes if ranks > 1)
    return f"{dims.world} ({text})" if text else str(dims.world)


def row(model: HfModel, experts: Experts | None) -> list[str]:
    """Return the cells of one model and what is trained of it. PEFT's file has what experts share once
    for each of them."""
    shape, written = trained_shape(model, experts), experts
    if experts == "shared_outer":
        written = "per_expert"
    held, filed = shape.adapter or shape, trained_shape(model, written).adapter
    file = size(2 * filed.num_parameters) if filed else ""
    gpus = [describe(smallest(shape, fits)) for fits in (holds_trainer, holds_both)]
    return [count(held.num_parameters), size(2 * held.num_parameters), file, *gpus]


def tables() -> str:
    """Return a row for each model and what is trained of it."""
    lines = [
        "| model | trained | parameters | bytes of a sync | PEFT's file | GPUs, trainer alone "
        "| GPUs, with engines |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, name in MODELS.items():
        model = published(name)
        for trained, experts in TRAINED.items():
            cells = (title, trained, *row(model, experts))
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return "\n".join(["", *lines, "", ""])


def page(text: str, made: str) -> str:
    """Return the page `text` with the tables that were made."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE}: the marks of the tables are missing"
    return before + BEGIN + made + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), tables()))
    print(f"wrote the tables of {PAGE}")
