"""This module compares every parallel layout with one process: `make layouts`.

Each takes three optimizer steps of all weights or of a LoRA adapter, with captured routes replayed (R3)
and activations recomputed, on up to 8 gloo ranks of a CPU with the real Megatron-core. Writes
runs/results/layouts.json. Layouts that are refused are tried too: the reason in the table is the error.

`--only TP2xPP2` measures the layouts of that name alone, and `--models gpt_oss` those of that model;
both write nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.evidence.result import finish, summary, write_result
from mrl.config.adapter import Experts
from mrl.errors import InputError
from mrl.types import Sample
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from tests.parallel.adapters import write_lora
from tests.parallel.conftest import make_samples, write_model
from tests.parallel.layouts import Agreement, Layout, agreement, parallel_config, train_layout
from tests.parallel.models import checkpoint_tensors, tiny_samples, write_tiny
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "layouts.md"
TEMPLATE = ROOT / "benchmarks" / "layouts.md.in"

TP2, PP2, CP2, EP2 = {"tensor": 2}, {"pipeline": 2}, {"context": 2}, {"expert": 2}
VPP2, ETP2 = {"pipeline": 2, "virtual_pipeline": 2}, {"tensor": 2, "expert_tensor": 2}
ALLGATHER = {"dispatcher": "allgather"}

FLOAT32 = [
    Layout(2), Layout(4), Layout(8),
    Layout(2, TP2), Layout(4, TP2),
    Layout(2, PP2), Layout(4, {"pipeline": 4}),
    Layout(2, PP2 | {"first": 1}), Layout(3, {"pipeline": 3, "first": 1, "last": 1}),
    Layout(2, VPP2), Layout(4, VPP2),
    Layout(2, EP2), Layout(4, {"expert": 4}), Layout(8, EP2),
    Layout(2, ETP2), Layout(4, ETP2 | EP2), Layout(8, ETP2 | EP2),
    Layout(2, CP2), Layout(4, {"context": 4}), Layout(8, {"context": 8}), Layout(4, CP2),
    Layout(2, EP2 | ALLGATHER), Layout(2, ETP2 | ALLGATHER), Layout(4, TP2 | EP2 | ALLGATHER),
    Layout(4, PP2 | EP2 | ALLGATHER), Layout(4, CP2 | EP2 | ALLGATHER),
    Layout(2, TP2 | EP2), Layout(8, TP2 | {"expert": 4}), Layout(4, TP2 | PP2),
    Layout(4, TP2 | VPP2), Layout(4, PP2 | EP2), Layout(8, PP2 | {"expert": 4}),
    Layout(4, VPP2 | EP2),
    Layout(2, CP2 | EP2), Layout(4, CP2 | {"expert": 4}), Layout(4, TP2 | CP2),
    Layout(8, TP2 | {"context": 4}), Layout(4, PP2 | CP2), Layout(4, VPP2 | CP2),
    Layout(4, TP2 | PP2 | EP2), Layout(8, TP2 | PP2 | EP2), Layout(8, TP2 | PP2 | CP2),
    Layout(8, TP2 | VPP2 | CP2 | EP2), Layout(8, ETP2 | PP2 | EP2),
    Layout(8, PP2 | CP2 | {"expert": 4}),
    Layout(2, distributed_optimizer=True), Layout(8, distributed_optimizer=True),
    Layout(4, EP2, distributed_optimizer=True), Layout(4, TP2 | EP2, distributed_optimizer=True),
    Layout(4, VPP2, distributed_optimizer=True),
    Layout(8, TP2 | CP2 | EP2, distributed_optimizer=True),
    Layout(8, TP2 | PP2 | EP2, distributed_optimizer=True),
    Layout(2, TP2 | EP2, recompute=False), Layout(2, VPP2, recompute=False),
    Layout(2, CP2, recompute=False),
]  # fmt: skip
BFLOAT16 = [
    dataclasses.replace(layout, dtype="bfloat16")
    for layout in (
        Layout(2), Layout(2, TP2), Layout(2, PP2), Layout(2, VPP2), Layout(2, EP2), Layout(2, ETP2),
        Layout(2, CP2), Layout(2, EP2 | ALLGATHER), Layout(2, distributed_optimizer=True),
        Layout(8, TP2 | PP2 | EP2, distributed_optimizer=True),
    )
]  # fmt: skip
MUON_SPARSE = [
    Layout(4, ETP2 | EP2, optimizer="muon"),
    Layout(4, TP2 | PP2, distributed_optimizer=True, optimizer="muon"),
]
SPARSE = [
    Layout(8, TP2 | PP2 | EP2),
    Layout(4, TP2 | CP2 | EP2, distributed_optimizer=True),
    Layout(4, ETP2 | EP2), Layout(4, VPP2 | CP2), Layout(4, CP2 | EP2 | ALLGATHER),
]  # fmt: skip
DENSE = [Layout(4, TP2 | PP2), Layout(4, TP2 | CP2), Layout(4, VPP2, distributed_optimizer=True)]
TOY = "qwen3_moe"
ARCHITECTURES = {
    "qwen3": DENSE, "qwen2": DENSE, "llama": DENSE,
    "qwen2_moe": SPARSE + MUON_SPARSE, "mixtral": SPARSE, "deepseek_v3": SPARSE + MUON_SPARSE,
    "deepseek_v32": SPARSE + MUON_SPARSE,
    "olmoe": SPARSE, "glm4_moe": SPARSE,
    "gpt_oss": [
        Layout(4, TP2 | EP2), *(each for each in SPARSE if "expert_tensor" not in each.sizes),
    ],
    "qwen3_next": [layout for layout in SPARSE + MUON_SPARSE if "context" not in layout.sizes],
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {"llama": {"tie_word_embeddings": True}}
"""What differs from the tiny models of tests/parallel/models.py."""


def lora(experts: Experts, layouts: Iterable[Layout]) -> list[Layout]:
    """Return layouts that train an adapter."""
    return [dataclasses.replace(layout, lora=experts) for layout in layouts]


MUON = [
    dataclasses.replace(layout, optimizer="muon")
    for layout in (
        Layout(2), Layout(2, TP2), Layout(2, VPP2), Layout(2, CP2), Layout(4, ETP2 | EP2),
        Layout(2, distributed_optimizer=True), Layout(4, TP2 | EP2, distributed_optimizer=True),
        Layout(4, ETP2, distributed_optimizer=True),
        Layout(8, TP2 | PP2 | EP2, distributed_optimizer=True),
        Layout(2, EP2, dtype="bfloat16", distributed_optimizer=True),
    )
]  # fmt: skip
LORA = [
    *lora("none", [
        Layout(2, TP2), Layout(2, CP2), Layout(8, TP2 | PP2 | CP2),
        Layout(4, EP2, distributed_optimizer=True),
    ]),
    *lora("per_expert", [
        Layout(2, TP2), Layout(2, VPP2), Layout(2, ETP2), Layout(2, EP2 | ALLGATHER),
        Layout(2, ETP2 | ALLGATHER), Layout(2, TP2 | EP2, recompute=False),
        Layout(2, distributed_optimizer=True),
        Layout(8, ETP2 | EP2, distributed_optimizer=True), Layout(4, ETP2 | EP2, loops=True),
        Layout(8, TP2 | VPP2 | CP2 | EP2),
        Layout(8, TP2 | PP2 | EP2, distributed_optimizer=True),
    ]),
    *lora("shared_outer", [
        Layout(2), Layout(2, PP2), Layout(2, EP2), Layout(2, ETP2),
        Layout(2, CP2 | EP2), Layout(2, ETP2 | ALLGATHER), Layout(4, TP2 | EP2 | ALLGATHER),
        Layout(2, VPP2, recompute=False), Layout(4, TP2 | EP2, distributed_optimizer=True),
        Layout(4, ETP2 | EP2, loops=True), Layout(8, ETP2 | PP2 | EP2),
        Layout(8, TP2 | PP2 | EP2, distributed_optimizer=True),
    ]),
    *(dataclasses.replace(layout, dtype="bfloat16") for layout in (
        *lora("per_expert", [
            Layout(2, ETP2), Layout(2, PP2), Layout(2, EP2), Layout(2, distributed_optimizer=True),
        ]),
        *lora("shared_outer", [
            Layout(2, CP2), Layout(8, TP2 | PP2 | EP2, distributed_optimizer=True),
        ]),
    )),
]  # fmt: skip
LORA_SPARSE = [
    *lora("per_expert", [Layout(4, ETP2 | EP2)]),
    *lora("shared_outer", [Layout(4, TP2 | CP2 | EP2, distributed_optimizer=True)]),
]
LORA_ARCHITECTURES = {
    **dict.fromkeys(
        ("qwen3", "qwen2", "llama"),
        lora("none", [Layout(4, TP2 | PP2), Layout(2, CP2, distributed_optimizer=True)]),
    ),
    **dict.fromkeys(
        ("qwen2_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3", "deepseek_v32"), LORA_SPARSE
    ),
    "gpt_oss": [*lora("per_expert", [Layout(4, TP2 | EP2)]), *LORA_SPARSE[1:]],
    "qwen3_next": lora("per_expert", [Layout(4, ETP2 | EP2)]),
}
REFUSED = [
    (3, TP2), (4, {"tensor": 4}), (3, {"expert": 3}), (4, EP2 | {"pipeline": 4, "context": 3}),
    (3, {"pipeline": 3}), (2, {"virtual_pipeline": 2}),
    (4, {"pipeline": 4, "first": 2}), (2, {"last": 1}), (3, {"expert_tensor": 3}),
]  # fmt: skip

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
"""Relative. The loss sums advantages of both signs (`ready_batch`): at ratio 1 it is -0.123, while
their mean absolute value is 1.6. Rounding alone changes it by more than this tolerance: `train_layout`
of `Layout(1, lora="shared_outer")` in bfloat16 and in float32 differ by 0.11 in the second step's loss
(x86 with AMX)."""


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    layout: str
    ranks: int
    dtype: str
    result: Agreement
    lora: Experts | None = None

    @property
    def passed(self) -> bool:
        found = self.result
        exact = found.loaded_bitwise and found.base_bitwise and found.replay_coverage == 1.0
        return exact and found.worst < TOLERANCE[self.dtype]


def measure() -> dict[str, Any]:
    """Run every layout, write the result, and return it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = list(measured_rows(folder))
        refused = [refusal(folder / TOY, world, sizes) for world, sizes in REFUSED]
    passed = sum(row.passed for row in rows)
    content = {
        "tolerance": TOLERANCE,
        "layouts": [dataclasses.asdict(row) for row in rows],
        "refused": refused,
    }
    packages = ("torch", "megatron-core")
    failed = len(rows) - passed
    return write_result("layouts", content, passed=passed, failed=failed, packages=packages)


def measured_rows(
    folder: Path, only: str = "", models: Sequence[str] = (TOY, *ARCHITECTURES)
) -> Iterator[Row]:
    """Yield the rows of all layouts of `models`, or of those called `only`; writes the models to
    `folder`."""
    model, samples = write_model(folder / TOY), make_samples()
    cases = [(model, samples, [*FLOAT32, *BFLOAT16, *MUON, *LORA])]
    for model_type, layouts in ARCHITECTURES.items():
        tiny = write_tiny(model_type, folder / model_type, **CHANGES.get(model_type, {}))
        cases.append((tiny, tiny_samples(tiny), layouts + LORA_ARCHITECTURES[model_type]))
    for model, samples, layouts in cases:
        wanted = [layout for layout in layouts if only in ("", layout.name)]
        if wanted and model.name in models:
            yield from compare(model, samples, wanted)


def compare(model: Path, samples: list[Sample], layouts: list[Layout]) -> Iterator[Row]:
    """Compare each layout with one process of the same number format and the same adapter."""
    base = checkpoint_tensors(model)
    adapters = {layout.lora: write_lora(model, layout.lora) for layout in layouts if layout.lora}

    def run(layout: Layout) -> dict[str, Any]:
        out = model.parent / "out"
        return run_ranks(layout.world, train_layout, model, layout, samples, folder=out)[0]

    ones: dict[tuple[str, str, Experts | None], dict[str, Any]] = {}
    for layout in layouts:
        kind = layout.dtype, layout.optimizer, layout.lora
        if kind not in ones:
            dtype, optimizer, adapter = layout.dtype, layout.optimizer, layout.lora
            ones[kind] = run(Layout(1, dtype=dtype, optimizer=optimizer, lora=adapter))
        sides: tuple[dict[str, Tensor], dict[str, Tensor] | None] = base, None
        if layout.lora is not None:
            sides = adapters[layout.lora], base
        found = agreement(run(layout), ones[kind], *sides)
        row = Row(model.name, layout.name, layout.world, layout.dtype, found, layout.lora)
        print(f"{'ok  ' if row.passed else 'FAIL'} {model.name} {_line(row)}", flush=True)
        yield row


def refusal(model: Path, world: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """Try a layout that must not start, and return what mrl says."""
    try:
        ParallelDims.create(parallel_config(sizes), world).check_model(HfModel.read(model).sizes)
    except InputError as error:
        asked = ", ".join(f"{key} {value}" for key, value in sizes.items())
        return {"asked": f"{asked} on {world} ranks", "reason": str(error)}
    raise AssertionError(f"{sizes} on {world} ranks was not refused")


def _line(row: Row) -> str:
    found = row.result
    merged = "" if row.lora is None else f" {found.merged:.1e} |"
    return (
        f"| {row.layout} | {row.ranks} | {found.loss:.1e} | {found.grad_norm:.1e} "
        f"| {found.weights:.1e} |{merged} {found.replay_coverage:.1f} |"
    )


def _with_model(head: str) -> str:
    """Put a column before those of a table's head."""
    return f"| model {head}".replace("\n", "\n|---")


def document(result: dict[str, Any]) -> str:
    """Return docs/layouts.md, made from the JSON alone."""
    rows = [Row(**{**row, "result": Agreement(**row["result"])}) for row in result["layouts"]]
    head = (
        "| layout | ranks | loss | gradient norm | weights | coverage |\n|---|---|---|---|---|---|"
    )

    whole = [row for row in rows if row.lora is None]

    def table(dtype: str) -> str:
        chosen = (row for row in whole if (row.model, row.dtype) == (TOY, dtype))
        return "\n".join([head, *map(_line, chosen)])

    others = (f"| {row.model} {_line(row)}" for row in whole if row.model != TOY)
    adapted = (f"| {row.model} {_line(row)}" for row in rows if row.lora is not None)
    lora_head = head.replace("weights |", "adapter | merged |") + "---|"

    refused = "\n".join(f"| {r['asked']} | {r['reason']} |" for r in result["refused"])
    return TEMPLATE.read_text().format(
        passed=result["passed"],
        failed=result["failed"],
        machine=result["machine"],
        versions=result["versions"],
        float32=table("float32"),
        bfloat16=table("bfloat16"),
        architectures="\n".join([_with_model(head), *others]),
        lora="\n".join([_with_model(lora_head), *adapted]),
        refused=refused,
        float32_tolerance=result["tolerance"]["float32"],
        bfloat16_tolerance=result["tolerance"]["bfloat16"],
    )


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page that is made from layouts.json."""
    return {DOCUMENT: document(result)}


def main() -> None:
    """Measure all layouts, or those of one name."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--only", default="", metavar="NAME", help="as in a row of docs/layouts.md")
    every = (TOY, *ARCHITECTURES)
    parser.add_argument("--models", nargs="+", choices=every, metavar="MODEL",
                        help=", ".join(every))  # fmt: skip
    arguments = parser.parse_args()
    only, models = arguments.only, arguments.models
    if only or models:
        with tempfile.TemporaryDirectory() as scratch:
            rows = measured_rows(Path(scratch), only, models or every)
            passed = [row.passed for row in rows]
        if not passed:
            parser.error(f"--only {only!r}: expected the name of a row of docs/layouts.md")
        finish(sum(passed), passed.count(False))
    result = measure()
    finish(result["passed"], result["failed"])


if __name__ == "__main__":
    main()
