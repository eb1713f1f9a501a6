"""Write docs/scaling.md: what the big recipes of launch/recipes cost, by mrl/planner.

    python benchmarks/scaling.py [--output docs/scaling.md]

Needs no GPU and no weights; the same bytes everywhere.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.evidence.result import finish, summary
from mrl.commands.scaling_plan import plan_workload
from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.planner.adapter import adapted_shape
from mrl.planner.hardware import EFFICIENCY, HARDWARE, Hardware
from mrl.planner.report import Table, tables
from mrl.planner.runtime import FRAGMENTATION
from mrl.planner.shape import ModelShape
from mrl.planner.units import size
from mrl.planner.verdict import verdict
from mrl.planner.workload import Workload
from parallel.architectures import find_architecture
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.lora.rules import read_adapter

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "benchmarks" / "models" / "scaling_text.md"
"""The words around the tables; {cases} and {assumptions} are filled in."""


@dataclass(frozen=True)
class Case:
    """A recipe of launch/recipes on as many GPUs as it is written for."""

    title: str
    recipe: str
    model: str
    gpu: str
    world: int
    changed: str
    """One key with which it no longer fits."""
    note: str = ""


CASES = (
    Case("Qwen3-30B-A3B on 8 x 80 GB", "qwen3_30b_a3b_8x80gb", "qwen3_30b_a3b", "h100", 8,
         "megatron.optimizer_offload_fraction=0.1"),
    Case("Qwen3-30B-A3B with LoRA on 2 x 80 GB", "qwen3_30b_a3b_lora_2x80gb", "qwen3_30b_a3b", "h100",
         2, "parallel.expert_model_parallel_size=1"),
    Case("Qwen3-30B-A3B on 8 x 141 GB", "qwen3_30b_a3b_8x141gb", "qwen3_30b_a3b", "h200", 8,
         "rollout.mem_fraction_static=0.95"),
    Case("Qwen3-30B-A3B on 64 x 80 GB", "qwen3_30b_a3b_64x80gb", "qwen3_30b_a3b", "h100", 64,
         "parallel.expert_model_parallel_size=2"),
    Case("A 671B MoE (DeepSeek-V3's sizes) on 128 x 141 GB", "deepseek_v3_671b_128x141gb",
         "deepseek_v3", "h200", 128, "rollout.mem_fraction_static=0.25",
         "In bfloat16 the weights alone are 1.34 TB and a node of eight H200 has 1.19 TB, so an "
         "engine takes 32 GPUs over four nodes. Nothing of this size has run. The published "
         "checkpoint is in 8 bits, which mrl refuses: convert it to bfloat16 first. Its "
         "multi-token-prediction layer is left out."),
)  # fmt: skip


def read_case(case: Case, *overrides: str) -> tuple[ModelShape, ParallelDims, Workload]:
    """Model, layout and work of a case's recipe, with keys of it changed."""
    recipe = load_recipe(ROOT / "launch" / "recipes" / f"{case.recipe}.yaml", list(overrides))
    model = published(case.model)
    shape = adapted_shape(model, recipe.lora and read_adapter(recipe.lora, model))
    dims = ParallelDims.create(recipe.parallel, case.world)
    dims.check_model(shape.sizes)
    return shape, dims, plan_workload(recipe, shape, case.world, None, recipe.rollout.context_len)


def read_model(name: str) -> ModelShape:
    return adapted_shape(published(name), None)


def published(name: str) -> HfModel:
    """Return a model of benchmarks/models, which has no weights."""
    path = ROOT / "benchmarks" / "models" / f"{name}.json"
    config = json.loads(path.read_text())
    return HfModel(path.parent, config, find_architecture(config))


def holds(case: Case) -> bool:
    """Tell whether the plan lets the recipe start, and refuses it with the changed key."""
    gpu = HARDWARE[case.gpu]
    try:
        changed_runs = verdict(*read_case(case, case.changed), gpu).runs
    except InputError:
        changed_runs = False
    return verdict(*read_case(case), gpu).runs and not changed_runs


def render() -> str:
    """Return the whole page."""
    cases = "\n\n".join(_section(case) for case in CASES)
    text = TEXT.read_text()
    return text.replace("{assumptions}", _assumptions()).replace("{cases}", cases)


def _section(case: Case) -> str:
    shape, dims, job = read_case(case)
    gpu = HARDWARE[case.gpu]
    try:
        refusal = verdict(*read_case(case, case.changed), gpu).text
    except InputError as error:
        refusal = str(error)
    lines = [
        f"### {case.title}",
        f"`launch/recipes/{case.recipe}.yaml`, `mrl check RECIPE --plan --gpus {case.world} --gpu "
        f"{case.gpu}`. {dims.describe()}; {job.prompts} prompts x {job.samples} samples of "
        f"{job.prompt_len} + {job.response_len} tokens, micro-batches of "
        f"{job.packed_tokens(dims)} tokens ({job.num_micro_batches(dims)} per data-parallel rank), "
        f"engines of {job.engine_tp} GPUs.",
        *([case.note] if case.note else []),
        *(markdown(table) for table in tables(shape, dims, job, gpu)),
        f"Verdict: {verdict(shape, dims, job, gpu).text}.",
        f"With `{case.changed}`: {refusal}.",
    ]
    return "\n\n".join(lines)


def markdown(table: Table) -> str:
    """Return the table in Markdown, under its title in bold."""
    lines = [table.header, tuple("---" for _ in table.header), *table.rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{table.title}**\n\n{text}"


def _assumptions() -> str:
    share = EFFICIENCY
    lines = [_hardware(gpu) for gpu in HARDWARE.values()]
    lines.append(
        f"- Shares of these that real code reaches: {share.flops} of the FLOPs, {share.hbm} of HBM, "
        f"{share.links} of NVLink and network, {share.host} of PCIe."
    )
    lines.append(
        f"- {share.bucket_s:g} s for each weight bucket and {1e3 * share.tensor_s:g} ms for each "
        "tensor in it, beside their bytes."
    )
    lines.append(
        f"- Runtime bytes are rows of their own in every case below. {FRAGMENTATION:.0%} of what "
        "torch's allocator manages are taken as lost to fragmentation."
    )
    lines.append(
        f"- A node has {size(HARDWARE['h100'].host_memory_bytes)} of host memory (`--host-memory`)."
    )
    return "\n".join(lines)


def _hardware(gpu: Hardware) -> str:
    return (
        f"- {gpu.name}: {size(gpu.memory_bytes)} usable, {gpu.flops / 1e12:.0f} TFLOP/s bf16 dense, "
        f"HBM {gpu.hbm / 1e9:.0f} GB/s, NVLink {gpu.nvlink / 1e9:.0f} GB/s and network "
        f"{gpu.network / 1e9:.0f} GB/s one way, PCIe {gpu.host / 1e9:.0f} GB/s."
    )


def main() -> None:
    """Write the page, and exit with 1 where a case does not come out as it should."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "scaling.md")
    output = parser.parse_args().output
    output.write_text(render())
    passed = sum(map(holds, CASES))
    print(f"wrote {output}")
    finish(passed, len(CASES) - passed)


if __name__ == "__main__":
    main()
