"""Reads a step's scored groups from the rollouts that another run saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.collect.task import lacks_masks
from mrl.config import Recipe
from mrl.errors import InputError
from mrl.run.folder import saved_step
from mrl.run.rollouts import load_groups, outline
from mrl.system.clock import Clock
from mrl.system.heartbeat import begin_step, phase
from mrl.types import SampleGroup, Statistics
from parallel.mesh import Mesh
from parallel.policy import Policy


class SavedCollector:
    """Reads the groups of `debug.load_rollouts`, step by step, without an engine or a reward
    function.

    It has the methods of `Collector`. Each rank keeps the tokens and routes of some groups, as if
    it had generated them. For the other groups it keeps outlines: groups whose tensors have a shape
    but no content (`mrl.run.rollouts.outline`).
    """

    start_text = "opening the saved rollouts"
    is_over = True
    """Always True, because `begin` reads the complete step."""

    def __init__(self, recipe: Recipe, mesh: Mesh) -> None:
        assert recipe.debug.load_rollouts is not None
        self.folder, self.mesh = recipe.debug.load_rollouts, mesh
        self.needs_masks = recipe.rollout.sampling_mask
        self.groups: list[SampleGroup] = []
        self.evaluation: dict[str, float] = {}
        self._state: dict[str, Any] = {}
        """The state that was loaded from a checkpoint. It comes from the collector that drew the
        prompts of the run, and is saved again unchanged."""

    def start(self, policy: Policy) -> None:
        """Do nothing: there is no engine to start."""

    def begin(self, step: int, clock: Clock) -> None:
        """Read the groups of a step. Raises InputError if a sample lacks a sampling mask although
        `rollout.sampling_mask` is set."""
        begin_step(step)
        self.groups = []  # releases the groups of the last step before others are read
        with phase("rollout"), clock.part("sync"), clock.part("score"), clock.part("rollout"):
            everything = load_groups(saved_step(self.folder, step))
            if self.needs_masks and any(map(lacks_masks, everything)):
                raise InputError(
                    f"debug.load_rollouts: {saved_step(self.folder, step)} has samples without "
                    "sampling masks, but rollout.sampling_mask is on; save rollouts with it, or turn "
                    "it off"
                )
            rank, world = self.mesh.rank, self.mesh.dims.world
            self.groups = [
                group if i % world == rank else outline(group) for i, group in enumerate(everything)
            ]

    def begin_evaluation(self, version: int) -> None:
        raise InputError(
            "evaluation: debug.load_rollouts starts no engine; leave it out to evaluate"
        )

    def sync(self, policy: Policy, version: int) -> None:
        """Do nothing: there is no engine."""

    def rollout(self, clock: Clock) -> None:
        """Do nothing: the step is over."""

    def score(self, clock: Clock) -> None:
        """Do nothing: the step is over."""

    def statistics(self) -> Statistics:
        return {}

    def engine_spans(self) -> Sequence[Sequence[tuple[float, float, str]]]:
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the loaded state unchanged, because this collector draws no prompts."""
        return self._state

    def load_state_dict(
        self, state: dict[str, Any], step: int, *, other_data: bool = False
    ) -> None:
        """Keep the state for later checkpoints. It is not used here, because only the number of the
        step determines which file is read."""
        self._state = {} if other_data else state

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
