"""The collector generates and scores the groups of a step, in one or more rounds.

A round has prompts, an evaluation, or both. A step usually has one round. Dynamic sampling adds
rounds with further prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mrl.collect.backlog import StepPrompts
from mrl.collect.base import Assignment, Pool, StepSchedule
from mrl.collect.dynamic_sampling import DynamicSampling
from mrl.collect.equal_rewards import EqualRewards
from mrl.collect.evaluation import finish_evaluation
from mrl.collect.prompts import PromptSupply, step_seed
from mrl.collect.saved import SavedCollector
from mrl.collect.task import share_partial, share_scored
from mrl.preflight import Plan
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.run.pending_prompts import read_pending
from mrl.system.clock import Clock
from mrl.system.heartbeat import begin_step, phase
from mrl.types import Max, SampleGroup, Statistics
from parallel.mesh import Mesh
from parallel.policy import Policy


@dataclass
class Round:
    """The prompts and the evaluation whose samples are generated and then scored together."""

    version: int
    """The version of the trainer's weights."""
    prompts: StepPrompts | None = None
    """The prompts that the round starts; None for an evaluation that is not part of a step."""
    batch: Assignment | None = None
    """The assignment of `prompts`; None if `prompts` is None."""
    evaluated: Assignment | None = None
    """The assignment of an evaluation; None if the round has no evaluation."""
    is_generated: bool = False
    """Whether all engines of all ranks have generated everything in this round."""

    @property
    def assignments(self) -> list[Any]:
        """The round's one or two assignments (objects of the pool's own class): first `batch`, then
        `evaluated`."""
        return [each for each in (self.batch, self.evaluated) if each is not None]


class Collector:
    """Collects the scored groups of a step. Every rank has the same groups in the same order.

    Every method is called on all ranks. The trainer calls `begin`. It then repeats `sync`,
    `rollout` and `score` until `is_over` is true. Afterwards `groups` holds the step's groups.
    Usually one pass is enough. There are more passes if an engine was lost, or if dynamic sampling
    draws further prompts.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        folder: RunFolder,
        supply: PromptSupply,
        pool: Pool[Any],
        schedule: StepSchedule,
    ) -> None:
        self.plan, self.mesh, self._folder = plan, mesh, folder
        self.supply, self.pool, self.schedule = supply, pool, schedule
        self.start_text = pool.start_text
        """The text that the terminal shows while `start` runs."""
        self.groups: list[SampleGroup] = []
        """The step's groups in prompt order, with rewards."""
        self.evaluation: dict[str, float] = {}
        """The metrics `eval/*` of the last evaluation; empty if the step has no evaluation."""
        self.round: Round | None = None
        """The current round, which is not scored yet; None between two steps."""
        self._step = 0
        self._dynamic_sampling: DynamicSampling | None = None
        self._numbers: dict[str, float] = {}
        warn = console.warn_on(mesh.rank == 0)
        self._equal_rewards = EqualRewards(
            plan.algorithm, plan.recipe.algorithm, plan.recipe.rollout.max_response_len, warn
        )

    def start(self, policy: Policy) -> None:
        """Start the engines, which may take long. Afterwards the policy is on the device."""
        self.pool.start(policy)

    def begin(self, step: int, clock: Clock) -> None:
        """Assign the prompts of a step to the engines, and an evaluation if one is due."""
        recipe = self.plan.recipe
        begin_step(step)
        self._forget()
        self._step = step
        if recipe.algorithm.dynamic_sampling:
            self._dynamic_sampling = DynamicSampling(recipe.rollout)
        self.round = Round(step, *self.schedule.begin_step(step))
        if recipe.eval.every and step % recipe.eval.every == 0:
            self.round.evaluated = self.pool.assign_evaluation(step)
        self.schedule.wait_for_room(step, clock)

    def begin_evaluation(self, version: int) -> None:
        """Begin a round without prompts, which evaluates weights of version `version` on the
        recipe's evaluation sets."""
        self._forget()
        self.round = Round(version, evaluated=self.pool.assign_evaluation(version))

    def _forget(self) -> None:
        """Release the groups and metrics of the last step. Routes take much host memory."""
        self._dynamic_sampling, self._numbers, self.evaluation = None, {}, {}
        self.groups = []
        self.pool.begin_step()

    @property
    def is_over(self) -> bool:
        """Whether the samples of all rounds that have begun are generated and scored."""
        return self.round is None

    def sync(self, policy: Policy, version: int) -> None:
        """Load the policy's weights into the engines as version `version`. See `Pool.sync`."""
        self.pool.sync(policy, version)

    @phase("rollout")
    def rollout(self, clock: Clock) -> None:
        """Generate the samples of the current round, or wait until other ranks have generated them.
        `clock` records the time under the name `rollout`."""
        assert self.round is not None
        self.round.is_generated = self.pool.rollout(self.round.assignments, self._step, clock)

    @phase("score")
    def score(self, clock: Clock) -> None:
        """If the samples of the current round are generated, share its groups and rewards with all
        ranks. `clock` records the time under the name `score`. Dynamic sampling may then begin another
        round."""
        ended = self.round
        assert ended is not None
        if not ended.is_generated:
            return  # the rest of the round is generated first
        self.round = None
        if ended.prompts is None or ended.batch is None:
            self._evaluate(ended, clock)
            return
        recipe, (scored,) = self.plan.recipe, ended.batch.scored
        with clock.part("score"):
            groups = share_scored(scored, recipe, self.mesh)
            resumes = recipe.rollout.partial_rollouts == "resume"
            partial = share_partial(scored, self.mesh) if resumes else []
        if self._dynamic_sampling is None or not self._dynamic_sampling.num_rounds:
            end_step = self.supply.backlog.end_step
            self._numbers |= end_step(ended.prompts, groups, partial, self._step)
            self._evaluate(ended, clock)
        if self._dynamic_sampling is None:
            self.groups = groups
            self._equal_rewards.look(self._step, groups)
        else:
            self._sample_further(self._dynamic_sampling, groups)

    def _evaluate(self, ended: Round, clock: Clock) -> None:
        if ended.evaluated is not None:
            with clock.part("eval"):
                self.evaluation = finish_evaluation(
                    self.plan, self.mesh, self._folder, ended.version, ended.evaluated.scored
                )

    def _sample_further(self, sampling: DynamicSampling, groups: list[SampleGroup]) -> None:
        """Add the groups of a round to the step. If groups are missing and another round is
        allowed, begin it; otherwise set the step's groups and metrics."""
        sampling.add(groups)
        if not sampling.is_over:
            seed = step_seed(self.plan.recipe.seed, self._step)
            further = sampling.next_round(self.supply.draw, seed)
            self.round = Round(self._step, further, self.schedule.assign(further, self._step))
            return
        if sampling.num_missing and self.mesh.rank == 0:
            console.warning(f"step {self._step}: {sampling.complaint()}")
        self.groups = sampling.result()
        self._numbers |= sampling.metrics()
        self._dynamic_sampling = None  # releases the groups that were replaced

    def statistics(self) -> Statistics:
        """Return this rank's measurements, which have the same keys on every rank. Call it once per
        step."""
        numbers = as_statistics(self._numbers | self.evaluation)
        return numbers | self.pool.statistics(self.groups, self._step)

    def engine_spans(self) -> Sequence[Sequence[tuple[float, float, str]]]:
        """Return each engine's time spans since the last call, on rank 0.

        A span is (begin, end, activity), with times in seconds since 1970. The result is empty if
        the engines are on the trainer's devices.
        """
        return self.pool.engine_spans()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and the pending prompts, in JSON types, on rank 0."""
        return self.schedule.state_dict(self._step)

    def load_state_dict(
        self, state: dict[str, Any], step: int, *, other_data: bool = False
    ) -> None:
        """Continue at `step` from a `state_dict`, perhaps from another kind of collector.

        With `other_data`, the data has changed: the state is not used, and the data is read from
        its beginning.
        """
        waiting = read_pending(state)
        if other_data:
            if waiting and self.mesh.rank == 0:
                console.warning(
                    f"the data has changed: {len(waiting)} pending prompts of the checkpoint, which "
                    "are of the former data, are not trained on"
                )
            return
        if "seed" in state:  # saved rollouts (`debug.load_rollouts`) draw no prompts
            self.supply.cursor.load_state_dict(state)
        started_over = self.schedule.take_up(waiting, step, state)
        num_lost = sum(bool(one.num_tokens) for one in started_over)
        if num_lost and self.mesh.rank == 0:
            console.warning(
                f"of {len(waiting)} pending prompts of the checkpoint, {num_lost} are generated again: "
                "their samples do not fit the changed recipe"
            )

    def close(self) -> None:
        """End all processes of the engines and rewards. May be called twice, and after a failure."""
        self.pool.close()


@phase("evaluate")
def evaluate(
    policy: Policy, collector: Collector | SavedCollector, version: int
) -> dict[str, float]:
    """Return the metrics `eval/*` of the policy on the recipe's evaluation sets. A collective."""
    clock = Clock()
    collector.begin_evaluation(version)
    while not collector.is_over:
        collector.sync(policy, version)
        collector.rollout(clock)
        collector.score(clock)
    return collector.evaluation


def as_statistics(numbers: Mapping[str, float]) -> Statistics:
    """Convert numbers to statistics. The numbers must be the same on every rank, because the
    maximum over the ranks is reported."""
    return {key: Max(torch.tensor(value, dtype=torch.float64)) for key, value in numbers.items()}
