"""Every algorithm on the toy task, a few steps each; their curves on file.

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
from tests.loop.shared_engine import SharedEngine
from tests.ranks import run_ranks

GOLDEN = Path(__file__).parent / "golden"
NUM_STEPS = 12
KEYS = ("loss/policy", "grad_norm", "reward/mean")

Curve = list[dict[str, float]]
"""The metrics of each step; KEYS of them on file."""


@dataclass(frozen=True)
class Variant:
    """Holds what differs in an algorithm's run from the others."""

    overrides: tuple[str, ...] = ()
    why: str = ""


FASTER = Variant(("optimizer.lr=1e-2",), "a std over the whole step makes its advantages smaller")
VARIANTS: dict[str, Variant] = {
    "reinforce_pp": FASTER,
    "decoupled_ppo": FASTER,
    "a3po": FASTER,
    "dapo": Variant(
        ("optimizer.lr=1e-2", "algorithm.dynamic_sampling=true"),
        "with its part that is the loop's",
    ),
    "ppo": Variant(
        ("optimizer.lr=2e-2", "critic.lr=3e-4", "algorithm.lam=1.0"),
        "its critic starts from nothing: a faster one, or leaning on it more, is noise at first",
    ),
    "vapo": Variant(
        ("optimizer.lr=1e-2", "critic.lr=1e-3", "critic.warmup_steps=1"),
        "in the first step only the critic is trained",
    ),
}
"""What is not here runs the task of `shared_engine.SMALL` for NUM_STEPS steps."""

NOT_RL = ("nll",)
"""Trains on SFT examples: it has no reward to raise."""


def algorithms() -> list[str]:
    return [name for name in list_algorithms() if name not in NOT_RL]


def curve_of(name: str, engine: SharedEngine, num_steps: int = NUM_STEPS) -> Curve:
    """The first `num_steps` steps. `name`: an algorithm of the folder, or a module from outside."""
    given = [f"algorithm.name={name}", f"train.num_steps={NUM_STEPS}"]
    run = engine.run(name, [*given, *VARIANTS.get(name, Variant()).overrides])
    return [run.run_step() for _ in range(num_steps)]


def record(names: Sequence[str], scratch: Path) -> dict[str, Curve]:
    engine = SharedEngine(scratch)
    try:
        return {name: curve_of(name, engine) for name in names}
    finally:
        engine.stop()


def read_golden(name: str) -> Curve:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def write_golden(name: str, curve: Curve) -> None:
    """One line a step, six digits: what another machine could not reproduce says nothing."""
    rows = [
        json.dumps(
            {key: None if row[key] != row[key] else float(f"{row[key]:.6g}") for key in KEYS}
        )
        for row in curve
    ]
    (GOLDEN / f"{name}.json").write_text("[\n " + ",\n ".join(rows) + "\n]\n")


def main() -> None:
    names = sys.argv[1:] or algorithms()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        (curves,) = run_ranks(1, record, names, runs, folder=Path(folder) / "out")
    for name, curve in curves.items():
        write_golden(name, curve)
        print(name, [round(row["reward/mean"], 3) for row in curve])


if __name__ == "__main__":
    main()
