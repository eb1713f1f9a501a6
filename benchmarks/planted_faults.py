"""This module plants faults into the real loop and asks `mrl why`:
`python -m benchmarks.planted_faults`.

A toy MoE (4 layers of 8 experts, 2 a token) learns first_char with the real Megatron and the real
SGLang; 64 samples of 24 tokens a step. Three healthy steps, then one faulty step after the other with a
healthy one between: one expert that the engine has not got since step 0, routes shifted by one token,
another temperature, the whole model an update late. Of each, metrics of the dashboard, and the first
finding of `mrl why`. Passes where every planted fault is named, with its layer and expert, shift or
temperature, and healthy steps are blamed on nothing. Then faults in several sizes on weights that
hardly move, to see from which size on they are named; the smallest ones need not be.

Both in float32 and in bfloat16, whose own mismatch hides small faults. Each of the four has a result
file of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import finish, summary, write_result
from benchmarks.planted_engine import (
    Engine,
    Fault,
    OtherTemperature,
    PerturbedExpert,
    ShiftedRoutes,
    StaleExpert,
)
from mrl.config import load_recipe
from mrl.diagnosis.why import Explanation, explain
from mrl.preflight import check
from mrl.run.folder import RunFolder
from mrl.toy_model import write_toy_model
from parallel import prepare
from parallel.mesh import destroy_mesh, init_mesh
from tests.loop.stepped import SteppedRun, part_of

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "launch/recipes/toy_moe.yaml"
OVERRIDES = (
    "rollout.engine=benchmarks.planted_engine",
    "rollout.canary_prompts=0",  # they would stop the run at the stale expert, before a token is made
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "rollout.max_response_len=24",
    "rollout.min_response_len=24",
    "optimizer.lr=3e-3",
    "diagnosis.decompose_every=0",
    "checkpoint.save_every=0",
    "train.num_steps=100",
)
LAYER, EXPERT = 2, 3
HEALTHY_FIRST = 3
PLANTED: dict[str, Fault] = {
    "stale expert": StaleExpert(LAYER, EXPERT, version=0),
    "shifted routes": ShiftedRoutes(1),
    "other temperature": OtherTemperature(1.1),
    "stale model": StaleExpert(0, None, version=8),
}
EXPERTS = ((1, 0), (2, 3), (4, 6))
EXPERT_SIZES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3)
TEMPERATURES = (1.0001, 1.001, 1.01, 1.03, 1.1, 1.5, 0.9)


@dataclass(frozen=True)
class Step:
    """A step holds the fault that was planted and the metrics."""

    fault: Fault | None
    step: int
    metrics: dict[str, float]

    def why(self, folder: RunFolder) -> Explanation:
        return explain(folder, self.step)


@contextmanager
def started(scratch: Path, more: Sequence[str] = ()) -> Iterator[SteppedRun]:
    """Start a run and its engine; end both, and the process groups, so that another can start."""
    model = scratch / "model"
    if not model.exists():
        write_toy_model(model)
    places = (f"model.path={model}", f"output_dir={scratch / 'run'}")
    recipe = load_recipe(RECIPE, [*places, *OVERRIDES, *more])
    plan = check(recipe, 1)
    folder = RunFolder(recipe.output_dir)
    folder.open(recipe)
    prepare()
    with ExitStack() as stack:
        mesh = init_mesh(plan.dims, recipe.seed)
        stack.callback(destroy_mesh)
        run = SteppedRun(plan, mesh, folder)
        stack.callback(run.collector.close)
        run.begin(None)
        yield run


def take(run: SteppedRun, fault: Fault | None) -> Step:
    """Take one step of the run with `fault` in its engine."""
    engine = part_of(run.collector).engine.server
    assert isinstance(engine, Engine)
    engine.fault = fault
    try:
        metrics = run.run_step()
    finally:
        engine.fault = None
    run.folder.add_metrics(metrics)
    return Step(fault, run.step - 1, metrics)


def plant(run: SteppedRun, faults: Sequence[Fault]) -> list[Step]:
    """Take healthy steps, then one with each fault, a healthy one after each."""
    steps = [take(run, None) for _ in range(HEALTHY_FIRST)]
    for fault in faults:
        steps += [take(run, fault), take(run, None)]
    return steps


def is_named(fault: Fault | None, found: Explanation) -> bool:
    """Tell whether the first finding is the fault, in its place and size."""
    first = found.findings[0]
    if isinstance(fault, PerturbedExpert | StaleExpert) and fault.expert is not None:
        where = ([fault.layer], [fault.expert])
        named = (first.where.get("layers"), first.where.get("experts")) == where
        return first.name == "stale_expert" and named
    if isinstance(fault, StaleExpert):
        return first.name == "stale_weights"
    if isinstance(fault, ShiftedRoutes):
        return first.name == "shifted_routes" and first.where["shift"] == fault.shift
    if isinstance(fault, OtherTemperature):
        close = abs(first.where.get("temperature", 0) / fault.temperature - 1) < 0.02
        return first.name == "temperature" and close
    return not any(finding.is_cause for finding in found.findings)


def row_of(step: Step, found: Explanation) -> dict[str, Any]:
    first = found.findings[0]
    keys = ("mismatch/logprob_abs_mean", "mismatch/k3", "routing/disagreement")
    return {
        "step": step.step,
        "fault": str(step.fault or "none"),
        **{key: float(f"{step.metrics[key]:.3g}") for key in keys},
        "named": is_named(step.fault, found),
        "finding": first.name,
        "severity": round(first.severity, 3),
        "text": first.text,
    }


def sweep(run: SteppedRun) -> list[dict[str, Any]]:
    """Plant faults of several sizes, each in a step of its own, on weights that hardly move."""
    sizes: list[Fault] = [
        *(PerturbedExpert(*place, size) for place in EXPERTS for size in EXPERT_SIZES),
        *(OtherTemperature(temperature) for temperature in TEMPERATURES),
        *(ShiftedRoutes(shift) for shift in (1, -1, 2)),
    ]
    return [_row(run, fault) for fault in sizes]


def _row(run: SteppedRun, fault: Fault) -> dict[str, Any]:
    step = take(run, fault)
    return row_of(step, step.why(run.folder))


def planted_rows(dtype: str) -> list[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory() as scratch,
        started(Path(scratch), [f"model.dtype={dtype}"]) as run,
    ):
        steps = plant(run, list(PLANTED.values()))
        return [row_of(step, step.why(run.folder)) for step in steps]


def size_rows(dtype: str) -> list[dict[str, Any]]:
    keys = [f"model.dtype={dtype}", "optimizer.lr=1e-6"]
    with tempfile.TemporaryDirectory() as scratch, started(Path(scratch), keys) as run:
        for _ in range(HEALTHY_FIRST):
            take(run, None)
        return sweep(run)


def record(dtype: str, part: str) -> tuple[int, int]:
    """Run a part, print its rows and write its result. Return (steps passed, steps failed)."""
    rows = PARTS[part](dtype)
    for row in rows:
        print(f"{dtype} {part} {json.dumps(row)}", flush=True)
    named = sum(row["named"] for row in rows)
    passed, failed = named, len(rows) - named
    if part == "sizes":  # the smallest ones need not be named
        print(f"{named} of {len(rows)} named")
        passed = failed = 0
    write_result(
        f"planted_{part}" + ("_bfloat16" if dtype == "bfloat16" else ""),
        {"dtype": dtype, "num_named": named, "rows": rows},
        passed=passed,
        failed=failed,
        packages=("torch", "megatron-core", "sglang"),
    )
    return passed, failed


PARTS = {"faults": planted_rows, "sizes": size_rows}
DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS))
    args = parser.parse_args()
    counts = [record(dtype, part) for dtype in args.dtypes for part in args.parts]
    finish(sum(passed for passed, _ in counts), sum(failed for _, failed in counts))


if __name__ == "__main__":
    main()
