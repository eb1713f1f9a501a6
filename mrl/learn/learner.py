"""This module trains on scored groups: log-probs before the update, advantages, optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe.provenance import provenance_metrics
from moe.routes import Replay
from mrl.algorithms.base import Algorithm, traits
from mrl.config import Recipe
from mrl.diagnosis.collect import Diagnosis
from mrl.errors import RunFailed
from mrl.exchange.rollouts import RolloutExchange
from mrl.learn.advantages import (
    compute_advantages,
    count_loss_tokens,
    credits_tokens,
    drop_from_loss,
    known_rewards,
    set_advantages,
    set_reward_advantages,
    shaped_rewards,
)
from mrl.learn.batching import make_train_batches, split_evenly
from mrl.learn.guards import check_finite
from mrl.learn.kl_control import KlControl
from mrl.learn.turn_rewards import with_turn_rewards
from mrl.learn.update_metrics import policy_metrics, value_metrics
from mrl.learn.updates import Updates
from mrl.system.clock import Clock
from mrl.system.heartbeat import phase
from mrl.types import MicroBatch, Sample, SampleGroup, TrainBatch
from parallel.critic import Critic
from parallel.forward import PassOutput
from parallel.mesh import Mesh
from parallel.policy import (
    Policy,
    with_old_logprobs,
    with_ref_logprobs,
    with_rollout_as_old,
)

Record = Callable[[list[SampleGroup]], None]
"""Writes the groups of a step, with their advantages, to the run folder. A collective."""


class _Ready(NamedTuple):
    """What the optimizer steps of a rollout start from."""

    batches: list[MicroBatch]
    """All mini-batches, with old log-probs and advantages."""
    replay: Replay
    before: PassOutput | None
    """The pass before the update; None where nothing needs one."""
    metrics: dict[str, float]


@dataclass
class Learner:
    """The learner updates the models with a step's groups on one rank; `learn` is a collective."""

    recipe: Recipe
    algorithm: Algorithm
    num_moe_layers: int
    """The whole model's, over all pipeline stages."""
    mesh: Mesh
    policy: Policy
    exchange: RolloutExchange
    diagnosis: Diagnosis
    critic: Critic | None = None
    """None if the algorithm has no critic."""

    def __post_init__(self) -> None:
        self.kl = KlControl(self.recipe.algorithm)
        self.updates = Updates(
            self.recipe, self.algorithm, self.mesh, self.policy, self.critic, self.kl
        )

    def state_dict(self) -> dict[str, Any]:
        return self.kl.state_dict() | self.updates.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.load_state_dict(state)
        self.updates.load_state_dict(state)

    def learn(
        self, step: int, groups: list[SampleGroup], clock: Clock, record: Record
    ) -> dict[str, float]:
        """Train on the scored groups of step `step` and return what that measured.

        Log-probs before the update (and of the reference), advantages, then one optimizer step per
        mini-batch: of the policy, unless its critic is still warming up, and of the critic. `step` is
        also the version of the weights that it updates. The policy is on the device. Samples that leave
        the loss stay whole in `groups`.

        `record` is called once, on every rank, with the advantages that are trained with on the groups:
        first of all where rewards alone give them, otherwise after the passes that they need and before
        the first optimizer step (with None where such a pass was not finite).

        Raises RunFailed, with the weights as they were, where a pass before the updates is not finite,
        where too many optimizer steps in a row are not (`guards.max_nonfinite_steps`), and in the first
        update of a start where the trainer disagrees with itself.
        """
        for group in groups:
            group.advantages = None  # a rollout from a file brings those of another run
        if not self._advantages_need_passes:  # a batch that breaks what follows is on file, whole
            max_len = self.recipe.rollout.max_response_len
            tokens = self._count_loss_tokens(groups)
            set_reward_advantages(groups, tokens, self.algorithm, self.kl.config, max_len)
            record(groups)
        in_loss = drop_from_loss(groups, self.recipe.algorithm)
        in_loss = with_turn_rewards(in_loss, self.algorithm, self.recipe.algorithm)
        samples = [sample for group in in_loss for sample in group.samples]
        batches = self._make_batches(step, in_loss)
        try:
            ready = self._prepare(step, groups, samples, batches, clock, record)
        except RunFailed:  # raised on every rank
            if any(group.advantages is None for group in groups):
                record(groups)
            raise
        trains = "train" if self.updates.trains_policy(step) else "train:warm-up"
        with phase(trains), clock.part("train"):
            done = self.updates.take(step, batches, ready.batches, ready.replay)
        steps = done.steps
        measured, before = ready.batches, ready.before
        if before is None and steps:  # the first update's own pass: the weights are the same
            measured, before = measured[done.first_micro_batch :], steps[0].output
        moe = self.recipe.moe
        metrics = ready.metrics | policy_metrics(
            step, measured, before, steps, self.mesh, moe, self.num_moe_layers
        )
        metrics |= done.metrics | value_metrics(done.value_steps)
        return metrics | self._step_end_metrics(samples, batches, metrics, trained=bool(steps))

    def _make_batches(self, step: int, groups: list[SampleGroup]) -> list[TrainBatch]:
        """Pack this rank's share of each mini-batch, with rewards and without advantages."""
        recipe = self.recipe
        max_len = recipe.rollout.max_response_len

        def with_rewards(part: list[SampleGroup]) -> tuple[list[Sample], list[float]]:
            shaped = [shaped_rewards(group, recipe.algorithm, max_len) for group in part]
            rewards = known_rewards(shaped, recipe.algorithm)
            return [s for group in part for s in group.samples], [r for own in rewards for r in own]

        return make_train_batches(
            [
                with_rewards(part)
                for part in split_evenly(groups, recipe.train.num_steps_per_rollout)
            ],
            self.algorithm,
            self.mesh,
            recipe.train.micro_batch_tokens,
            self.exchange.deliver if recipe.captures_routes else None,
            self.exchange.deliver_tokens,
            drops_stale=recipe.moe.routing_replay == "r3",
            config=recipe.algorithm,
            max_response_len=max_len,
            version=step,
        )

    def _prepare(
        self,
        step: int,
        groups: list[SampleGroup],
        samples: list[Sample],
        batches: list[TrainBatch],
        clock: Clock,
        record: Record,
    ) -> _Ready:
        """Everything before the first optimizer step. Raises RunFailed where a pass is not finite."""
        recipe = self.recipe
        flat, metrics = [micro for batch in batches for micro in batch.micro_batches], {}
        if not self._advantages_need_passes:
            flat, metrics = self._with_advantages(step, flat, groups, clock)
        replay = Replay.rollout if recipe.moe.routing_replay == "r3" else Replay.off
        before: PassOutput | None = None
        if self._needs_old_logprobs(step):
            with phase("logprobs"), clock.part("logprob"):
                before = self.policy.forward_only(
                    flat, replay, observe=self.diagnosis.observe(step)
                )
            if recipe.moe.routing_replay == "r2":
                replay = Replay.recorded(before.native_routes)
            flat = with_old_logprobs(flat, before)
        if not self._trainer_is_old:
            flat = with_rollout_as_old(flat)
        if recipe.algorithm.kl_coef:
            with phase("logprobs:reference"), clock.part("ref_logprob"), self.policy.reference():
                reference = self.policy.forward_only(flat, replay)
            check_finite(step, "the reference's log-probs", flat, reference.logprobs)
            flat = with_ref_logprobs(flat, reference)
        if self._advantages_need_passes:
            flat, metrics = self._with_advantages(step, flat, groups, clock)
            record(groups)
        if before is not None:
            with phase("logprobs:diagnosis"), clock.part("diagnosis"):
                metrics |= self.diagnosis.before_update(step, samples, flat, before)
            # With the tokens on file.
            check_finite(step, "log-probs before the update", flat, before.logprobs)
        return _Ready(flat, replay, before, metrics)

    @property
    def _advantages_need_passes(self) -> bool:
        return self.kl.in_reward or credits_tokens(self.algorithm, self.recipe.algorithm, False)

    def _count_loss_tokens(self, groups: list[SampleGroup]) -> torch.Tensor:
        drops_stale = self.recipe.moe.routing_replay == "r3"
        return count_loss_tokens(groups, self.recipe.algorithm, drops_stale=drops_stale)

    def _with_advantages(
        self, step: int, flat: list[MicroBatch], groups: list[SampleGroup], clock: Clock
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """Compute the advantages, and write them into the groups and the micro-batches."""
        config, penalties, values, after = self.recipe.algorithm, None, None, None
        metrics: dict[str, float] = {}
        if self.kl.in_reward:
            num_samples = sum(len(group.samples) for group in groups)
            penalties = self.kl.penalties(flat, num_samples, self.mesh)
            metrics["kl/ref"] = penalties.mean
        if self.critic is not None:
            with phase("logprobs:values"), clock.part("value"):
                values, after = self.critic.values(flat)
            for each in (values, after):
                check_finite(step, "the critic's values", flat, each)
        max_len = self.recipe.rollout.max_response_len
        found = compute_advantages(
            flat,
            [shaped_rewards(group, config, max_len) for group in groups],
            self._count_loss_tokens(groups),
            self.algorithm,
            self.kl.config,
            self.mesh,
            penalties=penalties,
            values=values,
            values_after=after,
        )
        set_advantages(groups, found.samples)
        return found.batches, metrics | found.metrics

    def _step_end_metrics(
        self,
        samples: list[Sample],
        batches: list[TrainBatch],
        metrics: dict[str, float],
        *,
        trained: bool,
    ) -> dict[str, float]:
        """Metrics of the KL's coefficient, which is adapted here, and of the replayed routes."""
        found: dict[str, float] = {}
        if self.recipe.algorithm.kl_coef:
            num_samples = sum(batch.num_samples for batch in batches)
            # A policy that was not trained, as in a critic's warm-up, says nothing of its coefficient.
            measured = metrics.get("kl/ref", math.nan) if trained else math.nan
            found |= self.kl.end_step(measured, num_samples)
        if self.recipe.moe.routing_replay == "r3":
            found |= provenance_metrics(samples)
            found["routing/wire_bytes_per_token"] = self.exchange.bytes_per_token
        return found

    @property
    def _trainer_is_old(self) -> bool:
        return self.recipe.algorithm.old_logprobs == "trainer"

    def _needs_old_logprobs(self, step: int) -> bool:
        """Return whether anything reads the trainer's log-probs from before the update. The metrics of
        the mismatch alone do not need them: the first update's own forward pass serves."""
        recipe = self.recipe
        return (
            (traits(self.algorithm).needs_old_logprobs and self._trainer_is_old)
            or recipe.moe.routing_replay == "r2"
            or self.kl.in_reward
            or recipe.algorithm.turn_rewards
            or self.critic is not None  # its warm-up has no pass of the policy
            or self.diagnosis.is_due(step)
        )
