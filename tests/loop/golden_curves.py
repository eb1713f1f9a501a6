"""Every algorithm on the toy task, a few steps each, all with one engine; their curves on file.

`python -m tests.loop.golden_curves [NAME ...]` runs them (all by default) and writes
tests/loop/golden/NAME.json anew: after a change that is meant to change the numbers, and only then.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.algorithms import list_algorithms
from mrl.config import load_recipe
from mrl.preflight import check
from mrl.run_folder import RunFolder
from mrl.toy_model import write_toy_model
from parallel import prepare
from parallel.groups import init_groups
from tests.loop.stepped import SteppedRun
from tests.ranks import run_ranks

REPOSITORY = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
NUM_STEPS = 12
KEYS = ("loss/policy", "grad_norm", "reward/mean")
COMMON = (
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "rollout.max_response_len=8",
    "rollout.min_response_len=0",
    "train.num_steps_per_rollout=2",
    "rollout.canary_prompts=0",
    "optimizer.lr=5e-3",
    "checkpoint.save_every=0",
)

Curve = list[dict[str, float]]
"""KEYS of each step, and whatever else a test wants to see."""


@dataclass(frozen=True)
class Variant:
    """In what an algorithm's run differs from the others, and why."""

    overrides: tuple[str, ...] = ()
    num_steps: int = NUM_STEPS
    why: str = ""


VARIANTS: dict[str, Variant] = {}
"""What is not here runs the common task: 8 prompts x 8 samples x 8 letters, lr 1e-2, 12 steps."""

NOT_RL = ("nll",)
"""Algorithms that train from demonstrations: they have no reward to raise."""


def algorithms() -> list[str]:
    return [name for name in list_algorithms() if name not in NOT_RL]


def run_all(names: Sequence[str], scratch: Path) -> dict[str, Curve]:
    """The curves of `names`, algorithms of the folder or from outside, one engine for all."""
    write_toy_model(scratch / "model", num_layers=2)
    prepare()
    groups = engine = None
    curves: dict[str, Curve] = {}
    try:
        for name in names:
            variant = VARIANTS.get(name, Variant())
            recipe = load_recipe(
                REPOSITORY / "launch/recipes/toy_moe.yaml",
                [
                    f"model.path={scratch / 'model'}",
                    f"output_dir={scratch / name}",
                    f"algorithm.name={name}",
                    f"train.num_steps={variant.num_steps}",
                    *COMMON,
                    *variant.overrides,
                ],
            )
            folder = RunFolder(recipe.output_dir)
            plan = check(recipe, 1)
            folder.open(recipe)
            groups = groups or init_groups(plan.dims, recipe.seed)
            run = SteppedRun(plan, groups, folder)
            engine = run.begin(engine)
            curves[name] = [run.run_step() for _ in range(variant.num_steps)]
    finally:
        if engine is not None:
            engine.stop()
    return curves


def record(names: Sequence[str], folder: Path) -> dict[str, Curve]:
    """`run_all` in a process of its own, whose world is one rank."""
    return run_ranks(1, run_all, list(names), folder / "runs", folder=folder / "out")[0]


def read_golden(name: str) -> Curve:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def write_golden(name: str, curve: Curve) -> None:
    """One line a step, six digits: what another machine could not reproduce says nothing."""
    rows = [json.dumps({key: float(f"{row[key]:.6g}") for key in KEYS}) for row in curve]
    (GOLDEN / f"{name}.json").write_text("[\n " + ",\n ".join(rows) + "\n]\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        curves = record(sys.argv[1:] or algorithms(), Path(scratch))
    for name, curve in curves.items():
        write_golden(name, curve)
        print(name, [round(row["reward/mean"], 3) for row in curve])


if __name__ == "__main__":
    main()
