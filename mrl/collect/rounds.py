"""This module is what all collectors with engines share: rounds of generation that make a step.

A round has prompts, an evaluation that is due, or both. One round is the rule; dynamic sampling draws
further prompts in others. Where and how a round is generated is the subclass's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mrl.collect.backlog import Backlog, StepPrompts
from mrl.collect.dynamic_sampling import DynamicSampling
from mrl.collect.evaluation import Evaluation
from mrl.collect.prompt_queue import PromptQueue
from mrl.collect.task import Scored, Task, share_partial, share_scored
from mrl.data import PromptCursor
from mrl.preflight import Plan
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.run.pending_prompts import PendingPrompt, pending_state, read_pending
from mrl.system.clock import Clock
from mrl.system.heartbeat import begin_step, phase
from mrl.types import Max, SampleGroup, Statistics
from parallel.mesh import Mesh


@dataclass
class Round:
    """Holds what the engines generate between two scorings, as one rank sees it."""

    prompts: StepPrompts | None
    """None in an evaluation on its own."""
    scored: Scored | None
    """What this rank gives to the step; None where that is nothing."""
    evaluation: Evaluation | None = None
    is_generated: bool = False
    """Whether no engine, on any rank, has anything left to generate."""
    tasks: list[Task] = field(default_factory=list)
    """What this rank's engine generates."""

    @property
    def remaining(self) -> list[Task]:
        """The tasks of this rank's engine that are not over."""
        return [task for task in self.tasks if not task.is_over]


class RoundCollector(ABC):
    """Draws the prompts of a step, and joins what its rounds give to the step's groups."""

    def __init__(self, plan: Plan, mesh: Mesh, folder: RunFolder) -> None:
        recipe = plan.recipe
        self.plan, self.mesh, self._folder = plan, mesh, folder
        self.cursor = PromptCursor(plan.sources, seed=recipe.seed, shuffle=recipe.data.shuffle)
        self.prompt_queue = PromptQueue(self.cursor)
        self.backlog = Backlog(recipe.rollout)
        self.groups: list[SampleGroup] = []
        self.evaluation: dict[str, float] = {}
        self._round: Round | None = None
        self._step, self._seed = 0, 0
        self._dynamic_sampling: DynamicSampling | None = None
        self._numbers: dict[str, float] = {}

    @abstractmethod
    def _new_round(self, prompts: StepPrompts | None, evaluates: int | None = None) -> Round:
        """Begin to generate `prompts`, and the evaluation of weights `evaluates`."""

    def begin(self, step: int, clock: Clock) -> None:
        recipe = self.plan.recipe
        begin_step(step)
        self._forget()
        self._step, self._seed = step, step_seed(recipe.seed, step)
        if recipe.algorithm.dynamic_sampling:
            self._dynamic_sampling = DynamicSampling(recipe.rollout)
        is_due = bool(recipe.eval.every) and step % recipe.eval.every == 0
        self._round = self._new_round(self._step_prompts(), step if is_due else None)

    def begin_evaluation(self, version: int) -> None:
        self._forget()
        self._round = self._new_round(None, version)

    def _step_prompts(self) -> StepPrompts:
        """Return the prompts that the step starts with."""
        return self.backlog.begin_step(self.prompt_queue.next, self._seed)

    def _forget(self) -> None:
        """Let go of the step before: its groups, with their routes, leave the host's memory."""
        self._dynamic_sampling, self._numbers, self.evaluation = None, {}, {}
        self.groups = []

    @property
    def is_over(self) -> bool:
        return self._round is None

    @phase("score")
    def score(self, clock: Clock) -> None:
        ended = self._round
        assert ended is not None
        if not ended.is_generated:
            return  # an engine was lost: what it left is generated first
        self._round = None
        if ended.prompts is None:
            self._evaluate(ended, clock)
            return
        recipe = self.plan.recipe
        with clock.part("score"):
            groups = share_scored(ended.scored, recipe, self.mesh)
            resumes = recipe.rollout.partial_rollouts == "resume"
            partial = share_partial(ended.scored, self.mesh) if resumes else []
        if self._dynamic_sampling is None or not self._dynamic_sampling.num_rounds:
            self._numbers |= self.backlog.end_step(ended.prompts, groups, partial, self._step)
            self._evaluate(ended, clock)
        if self._dynamic_sampling is None:
            self.groups = groups
        else:
            self._sample_further(self._dynamic_sampling, groups)

    def _evaluate(self, ended: Round, clock: Clock) -> None:
        if ended.evaluation is not None:
            with clock.part("eval"):
                self.evaluation = ended.evaluation.finish()

    def _sample_further(self, sampling: DynamicSampling, groups: list[SampleGroup]) -> None:
        """Take in the groups of a round; begin another one where groups are missing."""
        sampling.add(groups)
        if not sampling.is_over:
            self._round = self._new_round(sampling.next_round(self.prompt_queue.next, self._seed))
            return
        if sampling.num_missing and self.mesh.rank == 0:
            console.warning(f"step {self._step}: {sampling.complaint()}")
        self.groups = sampling.result()
        self._numbers |= sampling.metrics()
        self._dynamic_sampling = None  # the groups that it replaced leave the host's memory

    def engine_spans(self) -> Sequence[Sequence[tuple[float, float, str]]]:
        return []

    def state_dict(self) -> dict[str, Any]:
        groups = self._backlog_groups()
        if self.mesh.rank:
            return {}
        return {**self.cursor.state_dict(), "waiting": pending_state(self._all_waiting(groups))}

    def _backlog_groups(self) -> list[SampleGroup]:
        """Return the groups that wait in the backlog, whole on rank 0. A collective."""
        return [one.group for one in self.backlog.waiting]

    def _all_waiting(self, backlog: Sequence[SampleGroup]) -> list[PendingPrompt]:
        """Return all pending prompts, on rank 0; `backlog` are the groups in the backlog."""
        return [*self.prompt_queue.waiting, *self.backlog.records(backlog)]

    def load_state_dict(
        self, state: dict[str, Any], step: int, *, other_data: bool = False
    ) -> None:
        waiting = read_pending(state)
        if other_data:
            if waiting and self.mesh.rank == 0:
                console.warning(
                    f"the data has changed: {len(waiting)} pending prompts of the checkpoint, which "
                    "are of the former data, are not trained on"
                )
            return
        if "seed" in state:  # saved rollouts (`debug.load_rollouts`) draw no prompts
            self.cursor.load_state_dict(state)
        num_lost = sum(bool(one.num_tokens) for one in self._take_up(waiting, step, state))
        if num_lost and self.mesh.rank == 0:
            console.warning(
                f"of {len(waiting)} pending prompts of the checkpoint, {num_lost} are generated again: "
                "their samples do not fit the changed recipe"
            )

    def _take_up(
        self, waiting: list[PendingPrompt], step: int, state: Mapping[str, Any]
    ) -> list[PendingPrompt]:
        """Continue at `step` with the pending prompts of a checkpoint; return those that start over.
        `state` is the whole state of the collector that wrote it."""
        rest = self.backlog.take_up(waiting)
        self.prompt_queue.put_first(rest)
        return rest


def step_seed(seed: int, step: int) -> int:
    """Return the seed of the prompts that step `step` of a run with `seed` starts."""
    return seed * 1_000_003 + step


def as_statistics(numbers: Mapping[str, float]) -> Statistics:
    """Return statistics of numbers that are the same on every rank."""
    return {key: Max(torch.tensor(value, dtype=torch.float64)) for key, value in numbers.items()}
