"""Take the optimizer steps of the policy and of its critic for one rollout, each under a guard."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from moe.routes import Replay
from mrl.algorithms.base import Algorithm, traits
from mrl.algorithms.entropy import with_entropy_bonus
from mrl.algorithms.logprob_pass import update_can_serve
from mrl.algorithms.value_loss import critic_loss
from mrl.config import Recipe
from mrl.learn.guards import UpdateGuard, check_first_update, sequence_clip
from mrl.learn.kl_control import KlControl
from mrl.learn.skipped_steps import LowEssSteps, NonFiniteSteps
from mrl.run import console
from mrl.system.heartbeat import phase
from mrl.types import LossOutput, MicroBatch, TrainBatch
from parallel.critic import Critic
from parallel.forward import LossFunction
from parallel.implementation import choose_dtype
from parallel.megatron_model import StepOutput
from parallel.mesh import Mesh
from parallel.pass_output import UNOBSERVED, Observer, PassOutput
from parallel.policy import Policy


class Updated(NamedTuple):
    """The results of the optimizer steps of a rollout, without the steps that were skipped."""

    steps: list[StepOutput]
    """The outputs of the policy's steps."""
    value_steps: list[StepOutput]
    """The outputs of the critic's steps."""
    metrics: dict[str, float]
    """The metrics `guard/*`, the number of empty mini-batches, and the numbers of skipped steps."""
    first_pass: PassOutput | None
    """The output of a training pass of the policy that used the weights from before the update. It
    is the pass of the first step that was not skipped or, if all steps were skipped, the first
    pass. None if there was no pass."""
    first_micro_batch: int
    """The index, in the rollout, of the first micro-batch of `first_pass`; 0 without a pass."""


def with_own_old_logprobs(loss: LossFunction) -> LossFunction:
    """Return a function that calls `loss`. If a micro-batch has no `old_logprobs`, the log-probs of the
    current pass, without gradient, take their place."""

    def filled(logprobs: torch.Tensor, batch: MicroBatch) -> LossOutput:
        if batch.old_logprobs is None:
            batch = dataclasses.replace(batch, old_logprobs=logprobs.detach())
        return loss(logprobs, batch)

    return filled


@dataclass
class Updates:
    """Takes the optimizer steps of a rollout on one rank. `take` is a collective."""

    recipe: Recipe
    algorithm: Algorithm
    mesh: Mesh
    policy: Policy
    critic: Critic | None
    kl: KlControl
    _has_updated: bool = False
    """Whether this process has taken an optimizer step of the policy."""

    def __post_init__(self) -> None:
        limit = self.recipe.guards.max_nonfinite_steps
        self._warn = console.warn_on(self.mesh.rank == 0)
        self._policy_steps = NonFiniteSteps("the policy", limit, self._warn)
        self._critic_steps = NonFiniteSteps("the critic", limit, self._warn)
        self._low_ess = LowEssSteps(self.recipe.guards, self._warn)

    def state_dict(self) -> dict[str, Any]:
        """Return the current numbers of consecutive skipped steps, by cause and model."""
        return {
            "nonfinite_steps": [self._policy_steps.in_a_row, self._critic_steps.in_a_row],
            "low_ess_steps": self._low_ess.in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the counts of a `state_dict`. A count that an older checkpoint lacks begins at 0."""
        found = state.get("nonfinite_steps", [0, 0])
        self._policy_steps.in_a_row, self._critic_steps.in_a_row = found
        self._low_ess.in_a_row = state.get("low_ess_steps", 0)

    def trains_policy(self, step: int) -> bool:
        """Return whether step `step` trains the policy. While the critic warms up, no step does."""
        return self.critic is None or step >= self.recipe.critic.warmup_steps

    @property
    def pass_is_old(self) -> bool:
        """Whether the log-probs of the policy's training pass serve as the old log-probs. If so, no
        separate pass computes the old log-probs (see `update_can_serve`).

        False for the first update after a start, because the guard of that update compares the
        training pass with a separate pass (`guards.ratio_tolerance`).
        """
        return self._has_updated and update_can_serve(self.recipe)

    def take(
        self,
        step: int,
        batches: list[TrainBatch],
        flat: list[MicroBatch],
        replay: Replay,
        observer: Observer = UNOBSERVED,
    ) -> Updated:
        """Take one optimizer step per mini-batch and epoch.

        flat: the micro-batches of all `batches` in order, with advantages. If they have no
        `old_logprobs`, the log-probs of each forward pass serve as old log-probs. observer: the
        observer of the policy's passes. A mini-batch without a loss token on any rank is left out,
        because Adam's momentum alone would change the weights.

        Raises NotFinite if too many consecutive steps were not finite, and RunFailed if too many
        consecutive steps had an effective sample size below `guards.min_ess`.
        """
        trains_policy = self.trains_policy(step)
        starts = accumulate((len(batch.micro_batches) for batch in batches), initial=0)
        shares = [slice(start, end) for start, end in pairwise(starts)]
        num_empty = sum(not batch.num_loss_tokens for batch in batches)
        self._policy_steps.begin()
        self._critic_steps.begin()
        self._low_ess.begin()
        done = Updated([], [], {}, None, 0)
        passes = self.recipe.train.num_epochs_per_rollout
        for batch, share in [*zip(batches, shares, strict=True)] * passes:
            if not batch.num_loss_tokens:
                continue
            ready = TrainBatch(flat[share], batch.num_loss_tokens, batch.num_samples)
            if trains_policy:
                routes = replay.of_batches(share)
                done = self._update_policy(step, ready, routes, share.start, done, observer)
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
        self,
        step: int,
        batch: TrainBatch,
        replay: Replay,
        start: int,
        done: Updated,
        observer: Observer,
    ) -> Updated:
        """Take one optimizer step of the policy.

        done: the results of the rollout's earlier steps. start: the index of the step's first
        micro-batch in the rollout. Returns a copy of `done` that also has the results of this step.
        If the step was skipped, the copy can differ from `done` only in `first_pass` and
        `first_micro_batch`.
        """
        algorithm, config = self.algorithm, self.kl.config

        def loss(logprobs: torch.Tensor, batch: MicroBatch) -> LossOutput:
            found = algorithm.loss(logprobs, batch, config)
            return with_entropy_bonus(found, batch, algorithm, config)

        guard = self._guard(step, is_first=not done.steps)
        # The guard sees micro-batches without `old_logprobs` as they are: it has nothing to compare.
        filled = with_own_old_logprobs(loss) if traits(algorithm).needs_old_logprobs else loss
        watched = guard.watch(filled)

        passes: list[PassOutput] = []

        def record(output: PassOutput) -> None:
            passes.append(output)
            observer.record(output)

        def train_step() -> StepOutput:
            observed = Observer(observer.observe, record)
            return self.policy.train_step(batch, watched, replay, guard.check, observed)

        found = self._policy_steps.take(step, lambda: self._low_ess.take(step, guard, train_step))
        if passes and (done.first_pass is None or (found is not None and not done.steps)):
            done = done._replace(first_pass=passes[0], first_micro_batch=start)
        if found is None:
            return done
        self._has_updated = True
        return done._replace(steps=[*done.steps, found], metrics=done.metrics | guard.metrics)

    def _update_critic(
        self, step: int, batch: TrainBatch, critic: Critic, steps: list[StepOutput]
    ) -> None:
        """Take one optimizer step of the critic; add its output to `steps` if it was not skipped."""
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
        """Make the guard that checks one optimizer step of the policy before weights change.

        is_first: whether no step of this rollout has updated the policy yet.
        """
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
