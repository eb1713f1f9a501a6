"""This module says what the stability study compares, and on which model. It imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "launch/recipes/stability.yaml"
SHAPE: dict[str, Any] = {"num_experts": 64}
"""Arguments of `mrl.toy_model.write_toy_model`; the others keep their defaults."""
ARMS: dict[str, list[str]] = {
    "off": ["moe.routing_replay=off"],
    "TIS": ["moe.routing_replay=off", "algorithm.importance=tis"],
    "R2": ["moe.routing_replay=r2"],
    "R3": ["moe.routing_replay=r3"],
    "GSPO": ["moe.routing_replay=off", "algorithm.name=gspo"],
    "R3+GSPO": ["moe.routing_replay=r3", "algorithm.name=gspo"],
}
"""Overrides of the recipe. `R2` replays in the update what the trainer itself chose before it."""

CORRECTIONS: dict[str, list[str]] = {
    **{arm: ARMS[arm] for arm in ("off", "TIS", "R3")},
    "R3+TIS": [*ARMS["R3"], "algorithm.importance=tis"],
}
"""The arms of `studies.quantization`."""


@dataclass(frozen=True)
class Job:
    """What tells one run from another."""

    arm: str
    seed: int
    num_steps: int
    start: str
    """The model folder that all runs start from."""
    folder: str
    """The run's own folder; new or empty."""
    more: tuple[str, ...] = ()
    """Overrides of the recipe, those of the arm among them."""
    recipe: str = str(RECIPE)
    is_moe: bool = True
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns of the result beside `arm` and `seed`, which tell it from those of other jobs."""
    router_noise: float = 0.0
    """The scale of the disturbance of the engine's routers (`studies.collapse`)."""

    @property
    def name(self) -> str:
        """The job in words."""
        return " ".join([*map(str, self.columns.values()), self.arm, f"seed {self.seed}"])
