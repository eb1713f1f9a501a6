"""This module says what `make lora` compares, and at which learning rates. It imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "launch/recipes/toy_moe.yaml"
"""The demo. All runs train it, and differ in the keys of their arm, the learning rate and the seed."""
NUM_STEPS = 70
SWEEP_SEED, SEED = 0, 1
"""The seed with which the learning rates are tried, and that of the comparison, which chose nothing."""
NUM_LAST = 5
"""Steps whose mean is the reward at the end."""


@dataclass(frozen=True)
class Arm:
    """An arm is a way to train."""

    tells: str
    """Its name in tables and plots."""
    keys: tuple[str, ...]
    """Overrides of the recipe."""


ARMS = {
    "full": Arm("all weights", ()),
    "lora": Arm(
        "LoRA",
        ("lora.rank=16", "lora.alpha=32", "lora.targets=attention", "lora.experts=per_expert"),
    ),
}
RATES = (1e-3, 3e-3, 1e-2)
"""The learning rates that each arm tries."""
LARGE = "large"
"""The larger model, on which weight syncs are timed and nothing is learned."""
LARGE_SHAPE: dict[str, Any] = {
    "hidden_size": 256, "num_layers": 8, "num_experts": 16, "moe_intermediate_size": 256,
}  # fmt: skip
LARGE_STEPS = 8
LARGE_KEYS = (
    "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2",
    "rollout.max_response_len=4", "rollout.min_response_len=4",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run trains one arm from one seed."""

    model: str
    """`base`, or `large`."""
    arm: str
    rate: float
    seed: int
    num_steps: int

    @property
    def name(self) -> str:
        return f"{self.model}_{self.arm}_{self.rate:.0e}_{self.seed}"

    def keys(self, start: Path, output: Path) -> list[str]:
        """Return the overrides of the recipe. `start` holds the models."""
        return [
            f"model.path={start / self.model}", f"output_dir={output}", f"seed={self.seed}",
            f"train.num_steps={self.num_steps}", f"optimizer.lr={self.rate}",
            "checkpoint.save_every=0", *ARMS[self.arm].keys,
            *(LARGE_KEYS if self.model == LARGE else ()),
        ]  # fmt: skip


Pair = Sequence[Run]
"""One run of each arm, which run side by side, so that what else the machine does falls on both."""


def sweep(num_steps: int) -> list[Pair]:
    """Return the runs that try the learning rates."""
    return [pair(SWEEP_SEED, num_steps, dict.fromkeys(ARMS, rate)) for rate in RATES]


def pair(seed: int, num_steps: int, rates: dict[str, float]) -> Pair:
    """Return one run of each arm on the task, given the learning rate of each arm."""
    return [Run("base", arm, rates[arm], seed, num_steps) for arm in ARMS]


def large(num_steps: int) -> Pair:
    """Return the runs that time the weight sync of the larger model."""
    return [Run(LARGE, arm, 1e-4, SEED, min(num_steps, LARGE_STEPS)) for arm in ARMS]
