"""From scored groups to new weights: log-probs before the update, credit, optimizer steps, metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from moe.provenance import provenance_metrics
from moe.routes import Replay
from mrl.algorithms.base import traits
from mrl.algorithms.value_loss import critic_loss
from mrl.diagnosis.collect import Diagnosis
from mrl.diagnosis.mismatch import mismatch_statistics
from mrl.exchange.rollouts import RolloutExchange
from mrl.learn.batching import make_train_batches, split_evenly
from mrl.learn.credit import credits_tokens, with_penalised_advantages, with_token_advantages
from mrl.learn.guards import UpdateGuard, check_finite, check_first_update, sequence_clip
from mrl.learn.kl_control import KlControl
from mrl.learn.shaping import shaped_rewards
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

_NO_UPDATE = {"loss/policy": math.nan, "loss/total": math.nan, "grad_norm": 0.0, "lr": 0.0}


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
        if state:  # none in a checkpoint from before there was one
            self.kl.load_state_dict(state)

    def learn(self, step: int, groups: list[SampleGroup], clock: Clock) -> dict[str, float]:
        """Old (and reference) log-probs, what each token is credited with, then one optimizer step per
        mini-batch: of the policy, unless its critic is still warming up, and of the critic.

        `step` is the number of the step, and of the weights that it updates. Raises RunFailed, with the
        weights as they were, where something is not finite, and in the first update of a start where
        the trainer disagrees with itself.
        """
        recipe, algorithm = self.plan.recipe, self.plan.algorithm
        self.policy.onload()
        replays_rollout = recipe.moe.routing_replay == "r3"
        batches = make_train_batches(
            [_samples(part) for part in split_evenly(groups, recipe.train.num_steps_per_rollout)],
            algorithm,
            self.mesh,
            recipe.train.micro_batch_tokens,
            self.exchange.deliver if recipe.captures_routes else None,
            self.exchange.deliver_tokens,
            drops_stale=replays_rollout,
            config=recipe.algorithm,
            max_response_len=recipe.rollout.max_response_len,
            version=step,
        )
        flat = [micro for batch in batches for micro in batch.micro_batches]
        replay = Replay.rollout if replays_rollout else Replay.off
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
        flat, metrics = self._credit(step, flat, groups, clock)
        if before is not None:
            with clock.part("diagnosis"):
                samples = _samples(groups)[0]
                metrics |= self.diagnosis.before_update(step, samples, flat, before)
            # With the tokens on file.
            check_finite(step, "log-probs before the update", flat, before.logprobs)
        with clock.part("train"):
            steps, value_steps, guards = self._update(step, batches, flat, replay)
        if before is None and steps:  # the first update's own pass: the weights are the same
            empty = takewhile(lambda batch: not batch.num_loss_tokens, batches)
            flat = flat[sum(len(batch.micro_batches) for batch in empty) :]
            before = steps[0].output
        metrics |= self._learning_metrics(step, flat, before, steps) | guards
        metrics |= self._value_metrics(value_steps)
        if recipe.algorithm.kl_coef:
            num_samples = sum(batch.num_samples for batch in batches)
            # A policy that was not trained, as in a critic's warm-up, says nothing of its coefficient.
            measured = metrics.get("kl/ref", math.nan) if steps else math.nan
            metrics |= self.kl.end_step(measured, num_samples)
        if replays_rollout:
            metrics |= provenance_metrics(_samples(groups)[0])
            metrics["routing/wire_bytes_per_token"] = self.exchange.bytes_per_token
        return metrics

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

    def _credit(
        self, step: int, flat: list[MicroBatch], groups: list[SampleGroup], clock: Clock
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """The micro-batches with the advantages that they train with, and what that measured."""
        recipe, algorithm = self.plan.recipe, self.plan.algorithm
        num_samples = sum(len(group.samples) for group in groups)
        penalties, metrics = None, {}
        if self.kl.in_reward:
            penalties = self.kl.penalties(flat, num_samples, self.mesh)
            metrics["kl/ref"] = penalties.mean
        if credits_tokens(algorithm, self.kl.in_reward):
            values = [torch.zeros_like(b.old_logprobs) for b in flat if b.old_logprobs is not None]
            if self.critic is not None:
                with clock.part("value"):
                    values = self.critic.values(flat)
                check_finite(step, "the critic's values", flat, values)
            flat, of_values = with_token_advantages(
                flat, values, penalties, algorithm, self.kl.config, num_samples, self.mesh
            )
            return flat, metrics | (of_values if self.critic is not None else {})
        if penalties is not None:
            max_len = recipe.rollout.max_response_len
            rewards = [shaped_rewards(group, recipe.algorithm, max_len) for group in groups]
            flat = with_penalised_advantages(flat, rewards, penalties, algorithm, self.kl.config)
        return flat, metrics

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


def _samples(groups: list[SampleGroup]) -> tuple[list[Sample], list[float]]:
    """Samples and their advantages."""
    advantages = [a for g in groups if g.advantages is not None for a in g.advantages.tolist()]
    return [sample for group in groups for sample in group.samples], advantages
