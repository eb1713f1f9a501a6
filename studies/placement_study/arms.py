"""This module says what the placement study compares, and on which tasks. It imports nothing heavy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "launch/recipes"
NUM_SEEDS = 3
NUM_RANKS = 2
"""Ranks of every run: two that do both, or one of each role. There is a core for each."""
_APART = ("rollout.placement=disaggregated", "rollout.num_ranks=1")
ARMS: dict[str, tuple[str, ...]] = {
    "colocated": (),
    "synchronous": (*_APART, "async.max_staleness=0"),
    "bound_1": (*_APART, "async.max_staleness=1"),
    "bound_2": (*_APART, "async.max_staleness=2"),
    "bound_4": (*_APART, "async.max_staleness=4"),
}
"""Overrides of a recipe. The engines of `bound_<n>` run freely."""
BOUNDS = {"synchronous": 0, "bound_1": 1, "bound_2": 2, "bound_4": 4}
COMMON = ("algorithm.importance=tis", "rollout.max_total_tokens=65536", "checkpoint.save_every=0")
"""Overrides of all arms: what an asynchronous run needs must not tell the arms apart. No engine waits
for room in its KV cache: two engines would have twice the room of one."""


@dataclass(frozen=True)
class Kind:
    """A kind is a task, with the arms that it is trained in."""

    tells: str
    """What kind of answers it has, for headings."""
    recipe: str
    keys: tuple[str, ...]
    num_steps: int
    prompt_len: int = 0
    """Letters of each prompt, where the study writes the prompts itself; 0 takes the recipe's file."""
    arms: tuple[str, ...] = tuple(ARMS)


KINDS: dict[str, Kind] = {
    "short": Kind(
        "short answers to long prompts, so that generation and training take about equal time",
        "toy_moe.yaml",
        ("rollout.max_response_len=16", "rollout.min_response_len=16"),
        25,
        prompt_len=104,
    ),
    "long": Kind("long-tailed answers", "long_tail.yaml", (), 20),
    "demo": Kind("the demo", "toy_moe.yaml", (), 16, arms=("synchronous", "bound_1", "bound_2")),
}


@dataclass(frozen=True)
class Run:
    """A run trains one arm on one task from one seed."""

    kind: str
    arm: str
    seed: int
    num_steps: int
    skipped: int
    """The first steps, which no timing counts: engines and allocators warm up, and queues fill."""

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.arm}_{self.seed}"

    def keys(self, start: Path, output: Path) -> list[str]:
        """Return the overrides of its recipe. `start`: what `placement_study.start` wrote."""
        kind = KINDS[self.kind]
        places = [f"model.path={start / self.kind}", f"output_dir={output}"]
        if kind.prompt_len:
            places.append(f"data.path={start / self.kind}.jsonl")
        if kind.recipe == "long_tail.yaml":
            places.append("sft=null")  # the model in `start` has had it
        numbers = [f"train.num_steps={self.num_steps}", f"seed={self.seed}"]
        return [*places, *numbers, *COMMON, *kind.keys, *ARMS[self.arm]]


def runs_of(
    kinds: list[str], arms: list[str], num_seeds: int, num_steps: int | None, skipped: int
) -> list[Run]:
    """Return the runs, seed after seed and arm beside arm, so that a busy hour is busy for all arms."""
    return [
        Run(kind, arm, seed, num_steps or KINDS[kind].num_steps, skipped)
        for seed in range(num_seeds)
        for kind in kinds
        for arm in KINDS[kind].arms
        if arm in arms
    ]


def settings() -> dict[str, Any]:
    """Return what results must have in common to stand in one table."""
    kinds = {name: dataclasses.asdict(kind) for name, kind in KINDS.items()}
    recipes = {kind.recipe: (RECIPES / kind.recipe).read_text() for kind in KINDS.values()}
    return {"arms": ARMS, "common": COMMON, "kinds": kinds, "recipes": recipes}
