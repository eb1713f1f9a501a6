"""The rollouts that another run saved, as the source of a step's scored groups."""

from __future__ import annotations

from typing import Any

from mrl.errors import InputError
from mrl.run.folder import saved_step
from mrl.run.rollouts import load_groups, outline
from mrl.system.clock import Clock
from mrl.types import SampleGroup, Statistics
from parallel.mesh import Mesh
from parallel.policy import Policy


class SavedCollector:
    """The groups of `debug.load_rollouts`, step by step; no engine and no reward function.

    Each rank keeps some groups whole, as if it had rolled them out, and of the others the outlines.
    """

    start_text = "opening the saved rollouts"

    def __init__(self, folder: str, mesh: Mesh) -> None:
        self.folder, self.mesh = folder, mesh

    def start(self, policy: Policy) -> None:
        """Nothing to make ready."""

    def collect(self, step: int, policy: Policy, clock: Clock) -> list[SampleGroup]:
        with clock.part("sync"), clock.part("score"), clock.part("rollout"):
            everything = load_groups(saved_step(self.folder, step))
            rank, world = self.mesh.rank, self.mesh.dims.world
            return [
                group if i % world == rank else outline(group) for i, group in enumerate(everything)
            ]

    def evaluate(self, version: int, policy: Policy, clock: Clock) -> dict[str, float]:
        raise InputError(
            "evaluation: debug.load_rollouts starts no engine; leave it out to evaluate"
        )

    def statistics(self) -> Statistics:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The step number says it all."""

    def close(self) -> None:
        """Nothing is held."""
