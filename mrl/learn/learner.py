"""From scored groups to new weights: log-probs before the update, credit, optimizer steps, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from moe.provenance import provenance_metrics
from moe.routes import Replay
from mrl.algorithms.base import traits
from mrl.algorithms.value_loss import critic_loss
from mrl.diagnosis.collect import Diagnosis
from mrl.diagnosis.mismatch import mismatch_statistics
from mrl.errors import RunFailed
from mrl.exchange.rollouts import RolloutExchange
from mrl.learn.advantages import (
    compute_advantages,
    credits_tokens,
    drop_from_loss,
    known_rewards,
    set_advantages,
    shaped_rewards,
)
from mrl.learn.batching import make_train_batches, split_evenly
from mrl.learn.guards import UpdateGuard, check_finite, check_first_update, sequence_clip
from mrl.learn.kl_control import KlControl
from mrl.preflight import Plan
from mrl.run import console
from mrl.system.clock import Clock
from mrl.types import LossOutput, MicroBatch, Sample, SampleGroup, TrainBatch
from parallel.critic import Critic
from parallel.forward import PassOutput
from parallel.implementation import choose_dtype
from parallel.megatron_model import StepOutput
from parallel.mesh import Mesh
from parallel.policy import Policy, with_old_logprobs, with_ref_logprobs
from parallel.reduce import merge, reduce_statistics

Record = Callable[[list[SampleGroup]], None]
"""Writes the groups of a step, with their advantages, to the run folder. A collective."""
_NO_UPDATE = {"loss/policy": math.nan, "loss/total": math.nan, "grad_norm": 0.0, "lr": 0.0}


class _Ready(NamedTuple):
    """What the optimizer steps of a rollout start from."""

    batches: list[MicroBatch]
    """Of all mini-batches, with old log-probs and advantages."""
    replay: Replay
    before: PassOutput | None
    """The pass before the update; None where nothing needs one."""
    metrics: dict[str, float]


@dataclass
class Learner:
    """The update of a step on one rank; `learn` is a collective."""

    plan: Plan
    mesh: Mesh
    policy: Policy
    exchange: RolloutExchange
    diagnosis: Diagnosis
    critic: Critic | None = None
    """Where the algorithm needs one."""
    _has_updated: bool = False
    """Since the start of this process."""

    def __post_init__(self) -> None:
        self.kl = KlControl(self.plan.recipe.algorithm)

    def state_dict(self) -> dict[str, Any]:
        return self.kl.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.load_state_dict(state)

    def learn(
        self, step: int, groups: list[SampleGroup], clock: Clock, record: Record
    ) -> dict[str, float]:
        """Train on the scored groups of step `step` and return what that measured.

        Log-probs before the update (and of the reference), advantages, then one optimizer step per
        mini-batch: of the policy, unless its critic is still warming up, and of the critic. `step` is
        also the version of the weights that it updates. `record` is called exactly once, on every rank,
        before the first optimizer step, with the advantages that are trained with on the groups (None
        where a pass before them was not finite). Samples that leave the loss stay whole in `groups`.

        Raises RunFailed, with the weights as they were, where something is not finite, and in the first
        update of a start where the trainer disagrees with itself.
        """
        self.policy.onload()
        in_loss = drop_from_loss(groups, self.plan.recipe.algorithm)
        samples = [sample for group in in_loss for sample in group.samples]
        batches = self._make_batches(step, in_loss)
        for group in groups:
            group.advantages = None  # a rollout from a file brings those of another run
        try:
            ready = self._prepare(step, groups, samples, batches, clock, record)
        except RunFailed:  # raised on every rank
            if any(group.advantages is None for group in groups):
                record(groups)
            raise
        with clock.part("train"):
            steps, value_steps, guards = self._update(step, batches, ready.batches, ready.replay)
        measured, before = ready.batches, ready.before
        if before is None and steps:  # the first update's own pass: the weights are the same
            empty = takewhile(lambda batch: not batch.num_loss_tokens, batches)
            measured = measured[sum(len(batch.micro_batches) for batch in empty) :]
            before = steps[0].output
        metrics = ready.metrics | self._learning_metrics(step, measured, before, steps) | guards
        metrics |= self._value_metrics(value_steps)
        return metrics | self._step_end_metrics(samples, batches, metrics, trained=bool(steps))

    def _make_batches(self, step: int, groups: list[SampleGroup]) -> list[TrainBatch]:
        """Pack this rank's share of each mini-batch, with rewards and without advantages."""
        recipe = self.plan.recipe
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
            self.plan.algorithm,
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
        """Everything before the first optimizer step. Raises RunFailed where a pass is not finite.

        Advantages that need no log-probs are on file before any pass of the models can fail.
        """
        recipe = self.plan.recipe
        flat, metrics = [micro for batch in batches for micro in batch.micro_batches], {}
        needs_passes = self.kl.in_reward or credits_tokens(self.plan.algorithm, False)
        if not needs_passes:
            flat, metrics = self._set_advantages(step, flat, groups, clock, record)
        replay = Replay.rollout if recipe.moe.routing_replay == "r3" else Replay.off
        before: PassOutput | None = None
        if self._needs_old_logprobs(step):
            with clock.part("logprob"):
                before = self.policy.forward_only(
                    flat, replay, observe=self.diagnosis.observe(step)
                )
            if recipe.moe.routing_replay == "r2":
                replay = Replay.recorded(before.native_routes)
            flat = with_old_logprobs(flat, before)
        if recipe.algorithm.kl_coef:
            with clock.part("ref_logprob"), self.policy.reference():
                reference = self.policy.forward_only(flat, replay)
            check_finite(step, "the reference's log-probs", flat, reference.logprobs)
            flat = with_ref_logprobs(flat, reference)
        if needs_passes:
            flat, metrics = self._set_advantages(step, flat, groups, clock, record)
        if before is not None:
            with clock.part("diagnosis"):
                metrics |= self.diagnosis.before_update(step, samples, flat, before)
            # With the tokens on file.
            check_finite(step, "log-probs before the update", flat, before.logprobs)
        return _Ready(flat, replay, before, metrics)

    def _set_advantages(
        self,
        step: int,
        flat: list[MicroBatch],
        groups: list[SampleGroup],
        clock: Clock,
        record: Record,
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """Compute the advantages, write them into the groups and have these recorded."""
        config, penalties, values = self.plan.recipe.algorithm, None, None
        metrics: dict[str, float] = {}
        if self.kl.in_reward:
            num_samples = sum(len(group.samples) for group in groups)
            penalties = self.kl.penalties(flat, num_samples, self.mesh)
            metrics["kl/ref"] = penalties.mean
        if self.critic is not None:
            with clock.part("value"):
                values = self.critic.values(flat)
            check_finite(step, "the critic's values", flat, values)
        max_len = self.plan.recipe.rollout.max_response_len
        found = compute_advantages(
            flat,
            [shaped_rewards(group, config, max_len) for group in groups],
            self.plan.algorithm,
            self.kl.config,
            self.mesh,
            penalties=penalties,
            values=values,
        )
        set_advantages(groups, found.samples)
        record(groups)
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
        if self.plan.recipe.algorithm.kl_coef:
            num_samples = sum(batch.num_samples for batch in batches)
            # A policy that was not trained, as in a critic's warm-up, says nothing of its coefficient.
            measured = metrics.get("kl/ref", math.nan) if trained else math.nan
            found |= self.kl.end_step(measured, num_samples)
        if self.plan.recipe.moe.routing_replay == "r3":
            found |= provenance_metrics(samples)
            found["routing/wire_bytes_per_token"] = self.exchange.bytes_per_token
        return found

    def _needs_old_logprobs(self, step: int) -> bool:
        """Whether anything reads the trainer's log-probs from before the update; for the metrics of
        the mismatch alone the first update's own forward pass will do."""
        recipe = self.plan.recipe
        return (
            traits(self.plan.algorithm).needs_old_logprobs
            or recipe.moe.routing_replay == "r2"
            or self.kl.in_reward
            or self.critic is not None  # its warm-up has no pass of the policy
            or self.diagnosis.is_due(step)
        )

    def _update(
        self,
        step: int,
        batches: list[TrainBatch],
        flat: list[MicroBatch],
        replay: Replay,
    ) -> tuple[list[StepOutput], list[StepOutput], dict[str, float]]:
        """Steps of the policy, of the critic, and `guard/*`.

        A mini-batch without a loss token on any rank updates nothing: Adam would move the weights by
        what it remembers.
        """
        algorithm, config = self.plan.algorithm, self.kl.config

        def loss(logprobs: torch.Tensor, batch: MicroBatch) -> LossOutput:
            return algorithm.loss(logprobs, batch, config)

        def value_loss(values: torch.Tensor, batch: MicroBatch) -> LossOutput:
            return critic_loss(values, batch, config)

        trains_policy = self.critic is None or step >= self.plan.recipe.critic.warmup_steps
        steps, value_steps, done, num_empty = [], [], 0, 0
        metrics: dict[str, float] = {}
        for batch in batches:
            share = slice(done, done + len(batch.micro_batches))
            done = share.stop
            if not batch.num_loss_tokens:
                num_empty += 1
                continue
            ready = TrainBatch(flat[share], batch.num_loss_tokens, batch.num_samples)
            if trains_policy:
                part = replay.of_batches(share)
                guard = self._guard(step, is_first=not steps)
                steps.append(self.policy.train_step(ready, guard.watch(loss), part, guard.check))
                metrics |= guard.metrics
            if self.critic is not None:
                guard = UpdateGuard(step, same_weights=False, clip=None, what="values")
                watched = guard.watch(value_loss)
                value_steps.append(self.critic.train_step(ready, watched, Replay.off, guard.check))
        if num_empty and self.mesh.rank == 0:
            console.warning(
                f"step {step}: {num_empty} of {len(batches)} mini-batches have no loss token and "
                "update nothing"
            )
        return steps, value_steps, {**metrics, "train/empty_mini_batches": float(num_empty)}

    def _guard(self, step: int, *, is_first: bool) -> UpdateGuard:
        """Of one optimizer step; `is_first`: of the step's rollout."""
        algorithm = self.plan.algorithm
        clip = sequence_clip(algorithm, self.plan.recipe.algorithm)
        judge = None
        if not self._has_updated:
            judge, self._has_updated = self._judge_first, True
        quantile = self.plan.recipe.guards.ratio_quantile
        return UpdateGuard(step, same_weights=is_first, clip=clip, quantile=quantile, judge=judge)

    def _judge_first(self, metrics: dict[str, float]) -> None:
        recipe = self.plan.recipe
        warn = console.warning if self.mesh.rank == 0 else lambda text: None
        check_first_update(metrics, recipe.guards, choose_dtype(recipe.model.dtype), warn)

    def _learning_metrics(
        self, step: int, flat: list[MicroBatch], old: PassOutput | None, steps: list[StepOutput]
    ) -> dict[str, float]:
        """`old`: before the update, over all micro-batches or those of the first mini-batch; None
        where there was no pass at all, as no token is in the loss."""
        if old is None:
            return dict(_NO_UPDATE)
        trained = merge([step.stats for step in steps])
        coverage = "routing/replay_coverage"
        # Disagreement is measured before the update; coverage must hold in every pass.
        before = {k: v for k, v in old.routing.items() if k != coverage}
        after = {k: v for k, v in trained.items() if k == coverage or k not in before}
        both = merge([{k: v for k, v in s.items() if k == coverage} for s in (old.routing, after)])
        mismatch = mismatch_statistics(flat, old, step) if self.mesh.reports_loss else {}
        metrics = reduce_statistics({**after, **before, **both, **mismatch})
        if not steps:  # the critic alone was trained, or nothing was
            return {**metrics, **_NO_UPDATE}
        metrics["loss/policy"] /= len(steps)
        return {
            **metrics,
            "loss/total": metrics["loss/policy"] + self._router_loss(metrics),
            "grad_norm": math.fsum(step.grad_norm for step in steps) / len(steps),
            "lr": steps[-1].lr,
        }

    def _value_metrics(self, steps: list[StepOutput]) -> dict[str, float]:
        if not steps:
            return {}
        metrics = reduce_statistics(merge([step.stats for step in steps]))
        metrics["loss/value"] /= len(steps)
        norm = math.fsum(step.grad_norm for step in steps) / len(steps)
        return {**metrics, "value/grad_norm": norm, "value/lr": steps[-1].lr}

    def _router_loss(self, metrics: dict[str, float]) -> float:
        """What the balancing losses of all MoE layers add to the loss."""
        moe = self.plan.recipe.moe
        aux = moe.aux_loss_coeff * metrics.get("moe/aux_loss", 0.0)
        z = moe.z_loss_coeff * metrics.get("moe/z_loss", 0.0)
        return (aux + z) * len(self.plan.model.moe_layer_numbers)


def make_critic(plan: Plan, policy: Policy, mesh: Mesh) -> Critic | None:
    """Where the plan has one; it shares the device with the policy."""
    if plan.critic is None:
        return None
    recipe = plan.recipe
    critic = Critic(
        plan.critic,
        mesh,
        recipe.model,
        recipe.optimizer.model_copy(update={"lr": recipe.critic.lr}),
        recompute=recipe.train.recompute,
        ledger=policy.ledger,
        head_std=recipe.critic.head_std,
        seed=recipe.seed,
        megatron=recipe.megatron,
    )
    policy.share_device(critic)
    return critic
