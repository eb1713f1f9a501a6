"""The protocols of the parts of a collector.

A `Collector` (collector.py) combines a `Pool` and a `StepSchedule`, which are independent choices.
The `Pool` knows whether the engines are on the trainer's devices or on separate ranks. The
`StepSchedule` decides which prompts a step trains on, and which prompts are rolled out before their
step begins. In a service each tenant has its own collector, whose pool uses the shared engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from mrl.collect.backlog import StepPrompts
from mrl.collect.task import Scored
from mrl.run.pending_prompts import PendingPrompt
from mrl.system.clock import Clock
from mrl.types import SampleGroup, Statistics
from parallel.policy import Policy

Assigned = TypeVar("Assigned", bound="Assignment")


class Assignment(Protocol):
    """A request to a pool to generate and score groups, and the results of the request. The groups
    are those of a round's prompts, or those of all evaluation sets."""

    @property
    def scored(self) -> Sequence[Scored | None]:
        """The results on this rank: one entry for the prompts of a round, or one for each
        evaluation set. An entry is None if this rank has no results."""
        ...


class Pool(Protocol[Assigned]):
    """The engines of one policy, wherever they are. Every method is a collective.

    Callers first call `assign` or `assign_evaluation`, or both. They then call `sync` and `rollout`
    in turn until `rollout` returns True.
    """

    start_text: str
    """The text that the terminal shows while `start` runs."""

    def start(self, policy: Policy) -> None:
        """Start the engines. Afterwards the policy is on the device."""
        ...

    def begin_step(self) -> None:
        """Reset the measurements for a new step."""
        ...

    def assign(self, prompts: StepPrompts, version: int) -> Assigned:
        """Distribute prompts over the engines, which generate their completions with weights of
        version `version`."""
        ...

    def assign_evaluation(self, version: int) -> Assigned:
        """Distribute the recipe's evaluation sets over the engines, which generate their completions
        with weights of version `version`."""
        ...

    def sync(self, policy: Policy, version: int) -> None:
        """Load the policy's weights into the engines as version `version`.

        Raises RunFailed if the export fails, or if engine and trainer disagree on the log-probs of the
        canaries, a few prompts that serve to check a sync (mrl/weight_sync/load.py).
        """
        ...

    def rollout(self, assignments: Sequence[Assigned], step: int, clock: Clock) -> bool:
        """Generate the samples of one round's assignments, or wait until they are generated. `clock`
        records the time under the name `rollout`.

        Returns False if some samples are not generated yet, because an engine was lost or needs
        newer weights first.
        """
        ...

    def gather(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """Return `groups`. On rank 0, the returned groups also have the tokens and routes that
        other ranks hold."""
        ...

    def statistics(self, groups: Sequence[SampleGroup], step: int) -> Statistics:
        """Return this rank's measurements of the step that trains on `groups`."""
        ...

    def engine_spans(self) -> Sequence[Sequence[tuple[float, float, str]]]:
        """Return each engine's time spans since the last call (see `Collector.engine_spans`)."""
        ...

    def close(self) -> None:
        """End all processes of the pool. May be called twice, and after a failure."""
        ...


class StepSchedule(Protocol):
    """Decides which prompts a step trains on, and which prompts are rolled out before their step
    begins. Every method is a collective."""

    def begin_step(self, step: int) -> tuple[StepPrompts, Assignment]:
        """Return the prompts of the first round of `step`, and their assignment."""
        ...

    def assign(self, prompts: StepPrompts, step: int) -> Assignment:
        """Assign the prompts of another round of `step` to the pool, and return the assignment."""
        ...

    def wait_for_room(self, step: int, clock: Clock) -> None:
        """Wait until the engines can receive the weights of `step`. The step has already begun."""
        ...

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return JSON-serializable state, on rank 0: the position in the data and the pending prompts.
        `step` is the last step that was trained."""
        ...

    def take_up(
        self, waiting: list[PendingPrompt], step: int, state: Mapping[str, Any]
    ) -> list[PendingPrompt]:
        """Continue at `step` with the pending prompts `waiting` of a checkpoint. Return those whose
        samples are generated again from the beginning.

        `state` is the complete `state_dict` in the checkpoint, perhaps from another kind of schedule.
        """
        ...
