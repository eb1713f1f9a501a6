"""Write docs/scaling.md: what Qwen3-30B-A3B and a 671B MoE cost, from the formulas of parallel/scaling.

    python benchmarks/scaling.py [--output docs/scaling.md]

Needs no GPU and no weights; the same bytes everywhere.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from mrl.errors import InputError
from parallel.dims import ParallelDims
from parallel.scaling.cost import HARDWARE, Efficiency, Hardware
from parallel.scaling.report import tables
from parallel.scaling.runtime import FRAGMENTATION
from parallel.scaling.shape import ModelShape, read_shape
from parallel.scaling.units import size
from parallel.scaling.verdict import verdict
from parallel.scaling.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "benchmarks" / "models" / "scaling_text.md"
"""The words around the tables; {cases} and {assumptions} are filled in."""


@dataclass(frozen=True)
class Case:
    title: str
    model: str
    gpu: str
    dims: ParallelDims
    work: Workload
    note: str = ""


def layout(world: int, tp: int, pp: int, ep: int, last: int | None = None) -> ParallelDims:
    return ParallelDims(world=world, tp=tp, pp=pp, vpp=1, cp=1, ep=ep, etp=1, last_layers=last)


def work(prompts: int, samples: int, engine_tp: int) -> Workload:
    """Two whole sequences a micro-batch, full recompute, distributed optimizer, R3."""
    return Workload(
        prompts=prompts,
        samples=samples,
        prompt_len=512,
        response_len=4096,
        micro_batch_tokens=9216,
        recompute=True,
        distributed_optimizer=True,
        engine_tp=engine_tp,
    )


CASES = (
    Case("Qwen3-30B-A3B on 8 H100", "qwen3_30b_a3b", "h100", layout(8, 4, 1, 8), work(64, 8, 4)),
    Case("Qwen3-30B-A3B on 64 H100", "qwen3_30b_a3b", "h100", layout(64, 4, 1, 8), work(256, 8, 4)),
    Case(
        "A 671B MoE (DeepSeek-V3's shape) on 512 H200",
        "deepseek_v3",
        "h200",
        layout(512, 2, 8, 8, last=5),
        work(512, 16, 32),
        "61 layers: 8 on each of the first seven stages and 5 on the last "
        "(`parallel.decoder_last_pipeline_num_layers: 5`). "
        "In bfloat16 the weights alone are 1.34 TB and a node of eight H200 has 1.19 TB, so an engine "
        "takes 32 GPUs over four nodes. Nothing of this size has run. "
        "The published checkpoint is in 8 bits, which mrl refuses: convert it to bfloat16 first. Its "
        "multi-token-prediction layer is left out.",
    ),
)


def read_model(name: str) -> ModelShape:
    return read_shape(json.loads((ROOT / "benchmarks" / "models" / f"{name}.json").read_text()))


def render() -> str:
    cases = "\n\n".join(_section(case) for case in CASES)
    text = TEXT.read_text()
    return text.replace("{assumptions}", _assumptions()).replace("{cases}", cases)


def _section(case: Case) -> str:
    shape, gpu = read_model(case.model), HARDWARE[case.gpu]
    job, dims = case.work, case.dims
    lines = [
        f"### {case.title}",
        f"{dims.describe()}; {job.prompts} prompts x {job.samples} samples of {job.prompt_len} + "
        f"{job.response_len} tokens, micro-batches of {job.packed_tokens(dims)} tokens "
        f"({job.num_micro_batches(dims)} per data-parallel rank), full recompute, distributed "
        f"optimizer, engines of {job.engine_tp} GPUs.",
        f"`mrl check` on these sizes: {_checked(shape, dims)}.",
        *([case.note] if case.note else []),
        *(table.markdown() for table in tables(shape, dims, job, gpu)),
        f"Verdict: {verdict(shape, dims, job, gpu).text}.",
    ]
    return "\n\n".join(lines)


def _checked(shape: ModelShape, dims: ParallelDims) -> str:
    try:
        dims.check_model(shape.sizes)
    except InputError as error:
        return f"refused ({error})"
    return "accepted"


def _assumptions() -> str:
    share = Efficiency()
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
    parser = argparse.ArgumentParser(description="write docs/scaling.md")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "scaling.md")
    output = parser.parse_args().output
    output.write_text(render())
    print(f"wrote {output}: {len(CASES)} cases")


if __name__ == "__main__":
    main()
