"""Takes the optimizer steps of a rollout, of the policy and of its critic, each under its guard."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from moe.routes import Replay
from mrl.algorithms.base import Algorithm
from mrl.algorithms.entropy import with_entropy_bonus
from mrl.algorithms.value_loss import critic_loss
from mrl.config import Recipe
from mrl.learn.guards import UpdateGuard, check_first_update, sequence_clip
from mrl.learn.kl_control import KlControl
from mrl.learn.low_ess import LowEssSteps
from mrl.learn.nonfinite import NonFiniteSteps
from mrl.run import console
from mrl.system.heartbeat import phase
from mrl.types import LossOutput, MicroBatch, TrainBatch
from parallel.critic import Critic
from parallel.implementation import choose_dtype
from parallel.megatron_model import StepOutput
from parallel.mesh import Mesh
from parallel.policy import Policy


class Updated(NamedTuple):
    """What the optimizer steps of a rollout gave, without those that were skipped."""

    steps: list[StepOutput]
    """The policy's."""
    value_steps: list[StepOutput]
    """The critic's."""
    metrics: dict[str, float]
    """`guard/*`, and how many steps were empty or skipped."""
    first_micro_batch: int
    """The number, in the rollout, of the first micro-batch of the first step of the policy."""


@dataclass
class Updates:
    """`Updates` takes the optimizer steps on one rank; `take` is a collective."""

    recipe: Recipe
    algorithm: Algorithm
    mesh: Mesh
    policy: Policy
    critic: Critic | None
    kl: KlControl
    _has_updated: bool = False
    """Whether this process has taken an optimizer step."""

    def __post_init__(self) -> None:
        limit = self.recipe.guards.max_nonfinite_steps
        self._warn = console.warning if self.mesh.rank == 0 else lambda text: None
        self._policy_steps = NonFiniteSteps("the policy", limit, self._warn)
        self._critic_steps = NonFiniteSteps("the critic", limit, self._warn)
        self._low_ess = LowEssSteps(self.recipe.guards, self._warn)

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps in a row were skipped last, of the policy and of the critic."""
        return {
            "nonfinite_steps": [self._policy_steps.in_a_row, self._critic_steps.in_a_row],
            "low_ess_steps": self._low_ess.in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue to count; a checkpoint of an earlier version counts from 0."""
        found = state.get("nonfinite_steps", [0, 0])
        self._policy_steps.in_a_row, self._critic_steps.in_a_row = found
        self._low_ess.in_a_row = state.get("low_ess_steps", 0)

    def trains_policy(self, step: int) -> bool:
        """Whether the policy is trained in a step; not while a critic warms up."""
        return self.critic is None or step >= self.recipe.critic.warmup_steps

    def take(
        self, step: int, batches: list[TrainBatch], flat: list[MicroBatch], replay: Replay
    ) -> Updated:
        """Take one optimizer step per mini-batch of `batches`, whose micro-batches with advantages are
        `flat`.

        A mini-batch without a loss token on any rank updates nothing: Adam's momentum would move the
        weights. Raises NotFinite after too many steps in a row that were not finite, and RunFailed
        after too many below `guards.min_ess`.
        """
        trains_policy = self.trains_policy(step)
        starts = accumulate((len(batch.micro_batches) for batch in batches), initial=0)
        shares = [slice(start, end) for start, end in pairwise(starts)]
        num_empty = sum(not batch.num_loss_tokens for batch in batches)
        self._policy_steps.begin()
        self._critic_steps.begin()
        self._low_ess.begin()
        done = Updated([], [], {}, 0)
        passes = self.recipe.train.num_epochs_per_rollout
        for batch, share in [*zip(batches, shares, strict=True)] * passes:
            if not batch.num_loss_tokens:
                continue
            ready = TrainBatch(flat[share], batch.num_loss_tokens, batch.num_samples)
            if trains_policy:
                done = self._update_policy(step, ready, replay.of_batches(share), share.start, done)
            if self.critic is not None:
                with phase("train:critic"):
                    self._update_critic(step, ready, self.critic, done.value_steps)
        if num_empty:
            self._warn(
                f"step {step}: {num_empty} of {len(batches)} mini-batches have no loss token and "
                "update nothing"
            )
        counts = {
            "train/empty_mini_batches": float(num_empty),
            "train/nonfinite_steps": float(self._policy_steps.num_skipped),
        }
        counts |= self._low_ess.metrics()
        if self.critic is not None:
            counts["value/nonfinite_steps"] = float(self._critic_steps.num_skipped)
        return done._replace(metrics=done.metrics | counts)

    def _update_policy(
        self, step: int, batch: TrainBatch, replay: Replay, start: int, done: Updated
    ) -> Updated:
        """Return `done` with one more step, or unchanged where that was skipped."""
        algorithm, config = self.algorithm, self.kl.config

        def loss(logprobs: torch.Tensor, batch: MicroBatch) -> LossOutput:
            found = algorithm.loss(logprobs, batch, config)
            return with_entropy_bonus(found, batch, algorithm, config)

        guard = self._guard(step, is_first=not done.steps)

        def train_step() -> StepOutput:
            return self.policy.train_step(batch, guard.watch(loss), replay, guard.check)

        found = self._policy_steps.take(step, lambda: self._low_ess.take(step, guard, train_step))
        if found is None:
            return done
        self._has_updated = True
        first = done.first_micro_batch if done.steps else start
        return done._replace(
            steps=[*done.steps, found],
            metrics=done.metrics | guard.metrics,
            first_micro_batch=first,
        )

    def _update_critic(
        self, step: int, batch: TrainBatch, critic: Critic, steps: list[StepOutput]
    ) -> None:
        """Take one step of the critic, and add it to `steps` unless it was skipped."""
        config = self.kl.config

        def loss(values: torch.Tensor, batch: MicroBatch) -> LossOutput:
            return critic_loss(values, batch, config)

        guard = UpdateGuard(step, same_weights=False, clip=None, what="values")
        found = self._critic_steps.take(
            step, lambda: critic.train_step(batch, guard.watch(loss), Replay.off, guard.check)
        )
        if found is not None:
            steps.append(found)

    def _guard(self, step: int, *, is_first: bool) -> UpdateGuard:
        """Make the guard of one optimizer step; `is_first`: the first of the rollout."""
        recipe = self.recipe
        clip = sequence_clip(self.algorithm, recipe.algorithm)
        judge = None if self._has_updated else self._judge_first
        quantile = recipe.guards.ratio_quantile
        same = is_first and recipe.algorithm.old_logprobs == "trainer"
        return UpdateGuard(
            step,
            same_weights=same,
            clip=clip,
            quantile=quantile,
            judge=judge,
            min_ess=recipe.guards.min_ess,
        )

    def _judge_first(self, metrics: dict[str, float]) -> None:
        recipe = self.recipe
        check_first_update(metrics, recipe.guards, choose_dtype(recipe.model.dtype), self._warn)
