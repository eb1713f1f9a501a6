"""This module compares training with shared prefixes to training without, in every layout of
`make layouts`: `python -m benchmarks.shared_layouts`.

Each layout takes three optimizer steps twice, with captured routes replayed (R3) and with or without
activation recompute, as the layout says: once with a row for every token, once with shared prefixes.
Gradient norm and weights (or adapter) have to agree to 1e-6, relative, in float32, and the loss to
5e-6. Writes runs/results/shared_layouts.json.

Each layout that is done is a line of runs/shared_layouts.jsonl: the same command continues a
measurement that was interrupted, and `--fresh` starts from the beginning. `--only TP2xPP2` measures
only the layouts of that name and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import finish, summary, write_result
from benchmarks.layouts import FLOAT32, LORA
from tests.parallel.adapters import write_lora
from tests.parallel.conftest import write_model
from tests.parallel.layouts import Layout, agreement, train_layout
from tests.parallel.shared_samples import make_mixed_groups
from tests.ranks import run_ranks

TOLERANCE, LOSS_TOLERANCE = 1e-6, 5e-6
"""Relative. The loss has terms of both signs, which add up to almost 0 in some steps."""
DONE = Path("runs/shared_layouts.jsonl")


def layouts() -> list[Layout]:
    """Return one process, and float32 layouts of `make layouts` for the Qwen3-MoE model.

    CP8 is left out: rows are shared in multiples of 16 there, which does not pay for samples that
    short. Of the layouts with an adapter, one of each kind stands for all.
    """
    whole = [layout for layout in FLOAT32 if layout.sizes.get("context") != 8]
    adapted = {layout.lora: layout for layout in LORA if layout.dtype == "float32"}
    return [Layout(1), Layout(1, recompute=False), *whole, *adapted.values()]


def measure(folder: Path, only: str, done: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one row for each layout, or for those called `only`; `done` has rows by name."""
    model = write_model(folder / "model")
    for experts in ("none", "per_expert", "shared_outer"):
        write_lora(model, experts)
    samples = make_mixed_groups()
    for layout in layouts():
        if only not in ("", layout.name):
            continue
        if layout.name in done:
            yield done[layout.name] | {"passed": passes(done[layout.name])}
            continue
        both = layout, dataclasses.replace(layout, share_prefixes=True)
        plain, shared = (
            run_ranks(each.world, train_layout, model, each, samples, folder=folder / "out")[0]
            for each in both
        )
        found = agreement(shared, plain, plain["loaded"])
        row = {
            "layout": layout.name,
            "ranks": layout.world,
            "shared_tokens": int(shared["shared"]),
            "loss": found.loss,
            "grad_norm": found.grad_norm,
            "weights": found.weights,
            "replay_coverage": found.replay_coverage,
        }
        row["passed"] = passes(row)
        print("ok  " if row["passed"] else "FAIL", row, flush=True)
        yield row


def passes(row: dict[str, Any]) -> bool:
    """Return whether a layout shared something, and computed the same."""
    exact = row["replay_coverage"] == 1.0 and row["shared_tokens"] > 0
    close = max(row["grad_norm"], row["weights"]) < TOLERANCE
    return exact and close and row["loss"] < LOSS_TOLERANCE


def main() -> None:
    """Measure all layouts, or those of one name."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--only", default="", metavar="NAME", help="as in a row of docs/layouts.md")
    parser.add_argument("--fresh", action="store_true", help="measure what is done again")
    args = parser.parse_args()
    only: str = args.only
    done: dict[str, dict[str, Any]] = {}
    if DONE.exists() and not args.fresh and not only:
        found = [json.loads(line) for line in DONE.read_text().splitlines()]
        done = {row["layout"]: row for row in found}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for row in measure(Path(scratch), only, done):
            rows.append(row)
            if not only:
                done[row["layout"]] = row
                DONE.parent.mkdir(exist_ok=True)
                DONE.write_text("".join(json.dumps(each) + "\n" for each in done.values()))
    if not rows:
        parser.error(f"--only {only!r}: expected the name of a row of docs/layouts.md")
    passed = sum(row["passed"] for row in rows)
    failed = len(rows) - passed
    if not only:
        content = {
            "tolerance": TOLERANCE,
            "loss_tolerance": LOSS_TOLERANCE,
            "tokens": sum(len(sample.token_ids) for sample in make_mixed_groups()),
            "layouts": rows,
        }
        packages = ("torch", "megatron-core")
        write_result("shared_layouts", content, passed=passed, failed=failed, packages=packages)
    finish(passed, failed)


if __name__ == "__main__":
    main()
