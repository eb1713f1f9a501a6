"""Train on the scored groups of a step: log-probs before the update, advantages, optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.provenance import provenance_metrics
from moe.routes import Replay
from mrl.algorithms.advantages import raw_rewards
from mrl.algorithms.base import Algorithm
from mrl.algorithms.logprob_pass import needs_logprob_pass
from mrl.config import Recipe
from mrl.diagnosis.collect import Diagnosis
from mrl.errors import RunFailed
from mrl.exchange.rollouts import RolloutExchange
from mrl.learn.advantages import (
    compare_rewards,
    compute_advantages,
    credits_tokens,
    set_advantages,
    with_advantages,
)
from mrl.learn.batching import make_train_batches, split_evenly
from mrl.learn.guards import check_finite
from mrl.learn.kl_control import KlControl
from mrl.learn.packs import shared_tokens, shares_prefixes
from mrl.learn.step_data import StepData, make_step_data, samples_of, shaping_metrics
from mrl.learn.update_metrics import policy_metrics, value_metrics
from mrl.learn.updates import Updates
from mrl.run import console
from mrl.system.clock import Clock
from mrl.system.heartbeat import phase
from mrl.types import MicroBatch, SampleGroup, TrainBatch
from parallel.critic import Critic
from parallel.mesh import Mesh
from parallel.pass_output import UNOBSERVED, Observer, PassOutput
from parallel.policy import (
    Policy,
    with_old_logprobs,
    with_ref_logprobs,
    with_rollout_as_old,
)

Record = Callable[[list[SampleGroup]], None]
"""A function that writes the groups of a step, with their advantages, to the run folder. A
collective."""


class _Prepared(NamedTuple):
    """The results of the passes before the update, for the optimizer steps of a rollout."""

    batches: list[MicroBatch]
    """The micro-batches of all mini-batches, with old log-probs and advantages."""
    replay: Replay
    before: PassOutput | None
    """The output of the policy's pass before the update; None if nothing needs that pass."""
    observer: Observer
    """Observes the training pass, if no separate pass before the update is run."""
    metrics: dict[str, float]


@dataclass
class Learner:
    """Updates the policy and its critic with the groups of a step, on one rank.

    `learn` and `record_untrained` are collectives.
    """

    recipe: Recipe
    algorithm: Algorithm
    num_moe_layers: int
    """The number of MoE layers of the whole model, over all pipeline stages."""
    mesh: Mesh
    policy: Policy
    exchange: RolloutExchange
    diagnosis: Diagnosis
    critic: Critic | None = None
    """The critic; None if the algorithm has no critic."""

    def __post_init__(self) -> None:
        self.kl = KlControl(self.recipe.algorithm)
        self.updates = Updates(
            self.recipe, self.algorithm, self.mesh, self.policy, self.critic, self.kl
        )
        models = [self.policy, *([self.critic] if self.critic else [])]
        warn = console.warn_on(self.mesh.rank == 0)
        self._shares_prefixes = shares_prefixes(self.recipe.train, models, warn)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next steps need besides the weights, as JSON-able values."""
        return self.kl.state_dict() | self.updates.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the values of a `state_dict`."""
        self.kl.load_state_dict(state)
        self.updates.load_state_dict(state)

    def learn(
        self, step: int, groups: list[SampleGroup], clock: Clock, record: Record
    ) -> dict[str, float]:
        """Train on the scored groups of step `step`, and return the metrics of the step.

        The passes before the update and the advantages come first. Then, in each epoch, the policy
        takes one optimizer step per mini-batch, unless the critic is still warming up. The critic,
        if there is one, also takes one optimizer step per mini-batch. `step` is also the version of
        the weights before the update. The policy must be on the device. Only the advantages of
        `groups` are changed.

        `record` is called once, on every rank, as soon as the groups have their advantages. If the
        advantages depend on the rewards alone, this is before any pass; otherwise it is after the
        passes that the advantages need. If the output of such a pass is not finite, `record` is
        called with groups that have no advantages (None).

        Raises RunFailed if the output of a pass before the update is not finite, if too many
        optimizer steps in a row are skipped (`guards.max_nonfinite_steps`,
        `guards.max_low_ess_steps`), or if two passes disagree in the first update after a start
        (`guards.ratio_tolerance`). The optimizer step that fails changes no weights.
        """
        for group in groups:
            group.advantages = None  # loaded rollouts have the advantages of another run
        data = self._step_data(groups)
        advantages = None if self._advantages_need_passes else self._compare(data)
        if advantages is not None:  # write them before anything else can fail
            record(groups)
        batches = self._make_batches(step, data)
        try:
            prepared = self._prepare(step, data, advantages, batches, clock, record)
        except RunFailed:  # raised on every rank
            if any(group.advantages is None for group in groups):
                record(groups)
            raise
        trains = "train" if self.updates.trains_policy(step) else "train:warm-up"
        with phase(trains), clock.part("train"):
            done = self.updates.take(
                step, batches, prepared.batches, prepared.replay, prepared.observer
            )
        steps = done.steps
        measured, before = prepared.batches, prepared.before
        if before is None:  # the first update's own pass has the same weights
            measured, before = measured[done.first_micro_batch :], done.first_pass
        moe = self.recipe.moe
        metrics = prepared.metrics | policy_metrics(
            step, measured, before, steps, self.mesh, moe, self.num_moe_layers
        )
        metrics |= done.metrics | value_metrics(done.value_steps)
        metrics |= self._step_end_metrics(data, batches, metrics, trained=bool(steps))
        return shaping_metrics(data, self.recipe.algorithm) | metrics

    def record_untrained(self, groups: list[SampleGroup], record: Record) -> dict[str, float]:
        """Record scored groups without training on them, and return the metrics of reward shaping.

        The advantages of the groups are computed from the rewards alone.
        """
        data = self._step_data(groups)
        self._compare(data)
        record(groups)
        return shaping_metrics(data, self.recipe.algorithm)

    def _step_data(self, groups: list[SampleGroup]) -> StepData:
        recipe = self.recipe
        return make_step_data(
            groups,
            self.algorithm,
            recipe.algorithm,
            recipe.rollout.max_response_len,
            uses_routes=recipe.captures_routes,
            replays_routes=recipe.moe.routing_replay == "r3",
        )

    def _compare(self, data: StepData) -> Tensor:
        """Compute the advantages f32[S] from the rewards alone, and write them into the groups."""
        counts, config = data.num_loss_tokens, self.kl.config
        episodes = [group.episodes for group in data.groups]
        advantages = compare_rewards(
            data.rewards, counts, self.algorithm, config, episodes=episodes
        )
        set_advantages(data.groups, advantages)
        return advantages

    def _make_batches(self, step: int, data: StepData) -> list[TrainBatch]:
        """Pack this rank's share of each mini-batch, with rewards but without advantages."""
        recipe = self.recipe
        rewards = raw_rewards(data.rewards, recipe.algorithm)  # NaN becomes 0
        pairs = list(zip(data.trained_groups, rewards, strict=True))
        parts = [
            (samples_of([group for group, _ in part]), torch.cat([own for _, own in part]).tolist())
            for part in split_evenly(pairs, recipe.train.num_steps_per_rollout)
        ]
        return make_train_batches(
            parts,
            self.algorithm,
            self.mesh,
            recipe.train.micro_batch_tokens,
            self.exchange.deliver if recipe.captures_routes else None,
            self.exchange.deliver_tokens,
            stale=data.stale_rows,
            config=recipe.algorithm,
            max_response_len=recipe.rollout.max_response_len,
            version=step,
            share_prefixes=self._shares_prefixes,
        )

    def _prepare(
        self,
        step: int,
        data: StepData,
        advantages: Tensor | None,
        batches: list[TrainBatch],
        clock: Clock,
        record: Record,
    ) -> _Prepared:
        """Run the passes that come before the first optimizer step.

        advantages: f32[S]; None if the advantages depend on the results of these passes. In that
        case, this method computes and records the advantages. Raises RunFailed if the output of a
        pass is not finite.
        """
        recipe, metrics = self.recipe, {}
        flat = [micro for batch in batches for micro in batch.micro_batches]
        if advantages is not None:
            flat = with_advantages(flat, advantages)
        replay = Replay.rollout if recipe.moe.routing_replay == "r3" else Replay.off
        before: PassOutput | None = None
        observe = self.diagnosis.observe(step)
        if self._needs_pass(step, data):
            with phase("logprobs"), clock.part("logprob"):
                keep = recipe.algorithm.router_shift_floor is not None
                keys = recipe.moe.routing_replay != "off"
                before = self.policy.forward_only(
                    flat, replay, observe=observe, keep_scores=keep, keep_keys=keys
                )
            if recipe.moe.routing_replay == "r2":
                replay = Replay.recorded(before.native_routes)
            replay = replay.with_keys(before.chosen_keys).compared_with(before.router_scores)
            flat = with_old_logprobs(flat, before)
        if not self._trainer_is_old:
            flat = with_rollout_as_old(flat)
        if recipe.algorithm.kl_coef:
            with phase("logprobs:reference"), clock.part("ref_logprob"), self.policy.reference():
                reference = self.policy.forward_only(flat, replay)
            check_finite(step, "the reference's log-probs", flat, reference.logprobs)
            flat = with_ref_logprobs(flat, reference)
        if advantages is None:
            flat, metrics = self._advantages_of_passes(step, flat, data, clock)
            record(data.groups)
        if before is not None:
            with phase("logprobs:diagnosis"), clock.part("diagnosis"):
                metrics |= self.diagnosis.before_update(step, data.samples, flat, before)
            # Checked only now, after the token record has been written.
            check_finite(step, "log-probs before the update", flat, before.logprobs)
        observer = UNOBSERVED
        if before is None and self.updates.pass_is_old:
            observer = Observer(observe, partial(self._save_tokens, step, data, flat, clock))
        return _Prepared(flat, replay, before, observer, metrics)

    def _save_tokens(
        self, step: int, data: StepData, flat: list[MicroBatch], clock: Clock, output: PassOutput
    ) -> None:
        """Write the token record of this step, if one is due. The record has the values that
        trainer and engine computed for the step's tokens. `output` is the output of the training
        pass."""
        with phase("logprobs:diagnosis"), clock.part("diagnosis"):
            self.diagnosis.save_tokens(step, data.samples, flat, output)

    @property
    def _advantages_need_passes(self) -> bool:
        """Whether the advantages depend on old or reference log-probs or on a critic's values."""
        return self.kl.in_reward or credits_tokens(self.algorithm, self.recipe.algorithm, False)

    def _advantages_of_passes(
        self, step: int, flat: list[MicroBatch], data: StepData, clock: Clock
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """Compute the advantages that depend on passes, and write them into the groups.

        Returns the micro-batches with their advantages, and the metrics `kl/ref` and `value/*`.
        """
        penalties, values, after = None, None, None
        metrics: dict[str, float] = {}
        if self.kl.in_reward:
            penalties = self.kl.penalties(flat, len(data.num_loss_tokens), self.mesh)
            metrics["kl/ref"] = penalties.mean
        if self.critic is not None:
            with phase("logprobs:values"), clock.part("value"):
                values, after = self.critic.values(flat)
            for each in (values, after):
                check_finite(step, "the critic's values", flat, each)
        found = compute_advantages(
            flat,
            data.rewards,
            data.num_loss_tokens,
            self.algorithm,
            self.kl.config,
            self.mesh,
            penalties=penalties,
            values=values,
            values_after=after,
        )
        set_advantages(data.groups, found.samples)
        return found.batches, metrics | found.metrics

    def _step_end_metrics(
        self,
        data: StepData,
        batches: list[TrainBatch],
        metrics: dict[str, float],
        *,
        trained: bool,
    ) -> dict[str, float]:
        """Adapt the KL penalty's coefficient, and return the metrics that are known after the updates.

        These are `kl/coef`, if there is a KL penalty, and metrics of the replayed routes, if the
        engine's routes are replayed (R3).
        """
        found: dict[str, float] = {}
        if self.recipe.algorithm.kl_coef:
            num_samples = sum(batch.num_samples for batch in batches)
            # If the policy was not trained, as in a critic's warm-up, NaN keeps the coefficient.
            measured = metrics.get("kl/ref", math.nan) if trained else math.nan
            found |= self.kl.end_step(measured, num_samples)
        if self._shares_prefixes:
            found |= shared_tokens(batches, self.mesh)
        if self.recipe.moe.routing_replay == "r3":
            found |= provenance_metrics(data.samples, data.stale_rows)
            found["routing/wire_bytes_per_token"] = self.exchange.bytes_per_token
        return found

    @property
    def _trainer_is_old(self) -> bool:
        return self.recipe.algorithm.old_logprobs == "trainer"

    def _needs_pass(self, step: int, data: StepData) -> bool:
        """Return whether the step needs a pass of the policy before the update.

        The mismatch metrics alone do not need this pass. They can use the first update's own
        forward pass.
        """
        serves = self.updates.pass_is_old and bool(data.num_loss_tokens.any())
        return (
            needs_logprob_pass(self.recipe, self.algorithm, update_serves=serves)
            or (self.diagnosis.saves_tokens(step) and not serves)
            or self.diagnosis.decomposes(step)
        )
