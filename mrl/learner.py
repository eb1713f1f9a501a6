"""From scored groups to new weights: log-probs before the update, optimizer steps, metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from moe.provenance import provenance_metrics
from mrl import console
from mrl.batching import make_train_batches, split_evenly
from mrl.collect import Clock
from mrl.diagnosis.collect import Diagnosis
from mrl.diagnosis.mismatch import mismatch_statistics
from mrl.exchange import RouteExchange
from mrl.guards import UpdateGuard, check_finite, check_first_update, sequence_clip
from mrl.preflight import Plan
from mrl.types import LossOutput, MicroBatch, Sample, SampleGroup, Statistics, TrainBatch
from parallel.forward import PassOutput, RecordedRoutes, without_gates
from parallel.groups import Groups
from parallel.implementation import choose_dtype
from parallel.policy import Policy, with_old_logprobs, with_ref_logprobs
from parallel.reduce import merge, reduce_statistics


@dataclass
class Learner:
    """The update of a step on one rank; `learn` is a collective."""

    plan: Plan
    groups: Groups
    policy: Policy
    exchange: RouteExchange
    diagnosis: Diagnosis
    _has_updated: bool = False
    """Since the start of this process."""

    def learn(self, step: int, groups: list[SampleGroup], clock: Clock) -> dict[str, float]:
        """Old (and reference) log-probs, then one optimizer step per mini-batch.

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
            self.groups,
            recipe.train.micro_batch_tokens,
            self.exchange.deliver if recipe.captures_routes else None,
            drops_stale=replays_rollout,
            config=recipe.algorithm,
            max_response_len=recipe.rollout.max_response_len,
        )
        flat = [micro for batch in batches for micro in batch.micro_batches]
        replay: RecordedRoutes | bool = replays_rollout
        with clock.part("logprob"):
            old = self.policy.logprobs(flat, replay, self.diagnosis.observe(step))
        if recipe.moe.routing_replay == "r2":
            replay = old.native_routes
        flat = with_old_logprobs(flat, old)
        if recipe.algorithm.kl_coef:
            with clock.part("ref_logprob"), self.policy.reference():
                ids = without_gates(replay)  # the reference's gates are its own
                flat = with_ref_logprobs(flat, self.policy.logprobs(flat, ids))
        with clock.part("diagnosis"):
            diagnosed = self.diagnosis.before_update(step, _samples(groups)[0], flat, old)
        check_finite(step, flat, old.logprobs)  # with the tokens on file

        def loss(logprobs: torch.Tensor, batch: MicroBatch) -> LossOutput:
            return algorithm.loss(logprobs, batch, recipe.algorithm)

        steps = []
        with clock.part("train"):
            done = 0
            guard_metrics: dict[str, float] = {}
            for batch in batches:
                share = slice(done, done + len(batch.micro_batches))
                done = share.stop
                routes = replay if isinstance(replay, bool) else replay[share]
                ready = TrainBatch(flat[share], batch.num_loss_tokens, batch.num_samples)
                guard = self._guard(step, is_first=not steps)
                steps.append(self.policy.train_step(ready, guard.watch(loss), routes, guard.check))
                guard_metrics |= guard.metrics
        mismatch = mismatch_statistics(flat, old, step) if self.groups.reports_loss else {}
        metrics = self._learning_metrics(mismatch, old, steps) | guard_metrics | diagnosed
        if replays_rollout:
            metrics |= provenance_metrics(_samples(groups)[0])
            metrics["routing/wire_bytes_per_token"] = self.exchange.bytes_per_token
        return metrics

    def _guard(self, step: int, *, is_first: bool) -> UpdateGuard:
        """Of one optimizer step; `is_first`: of the step's rollout."""
        algorithm = self.plan.algorithm
        clip = sequence_clip(algorithm, self.plan.recipe.algorithm)
        judge = None
        if not self._has_updated:
            judge, self._has_updated = self._judge_first, True
        return UpdateGuard(step, same_weights=is_first, clip=clip, judge=judge)

    def _judge_first(self, metrics: dict[str, float]) -> None:
        recipe = self.plan.recipe
        warn = console.warning if self.groups.rank == 0 else lambda text: None
        check_first_update(metrics, recipe.guards, choose_dtype(recipe.model.dtype), warn)

    def _learning_metrics(
        self, mismatch: Statistics, old: PassOutput, steps: list[Any]
    ) -> dict[str, float]:
        trained = merge([step.stats for step in steps])
        coverage = "routing/replay_coverage"
        # Disagreement is measured before the update; coverage must hold in every pass.
        before = {k: v for k, v in old.routing.items() if k != coverage}
        after = {k: v for k, v in trained.items() if k == coverage or k not in before}
        both = merge([{k: v for k, v in s.items() if k == coverage} for s in (old.routing, after)])
        metrics = reduce_statistics({**after, **before, **both, **mismatch})
        metrics["loss/policy"] /= len(steps)
        return {
            **metrics,
            "loss/total": metrics["loss/policy"] + self._router_loss(metrics),
            "grad_norm": math.fsum(step.grad_norm for step in steps) / len(steps),
            "lr": steps[-1].lr,
        }

    def _router_loss(self, metrics: dict[str, float]) -> float:
        """What the balancing losses of all MoE layers add to the loss."""
        moe = self.plan.recipe.moe
        aux = moe.aux_loss_coeff * metrics.get("moe/aux_loss", 0.0)
        z = moe.z_loss_coeff * metrics.get("moe/z_loss", 0.0)
        return (aux + z) * len(self.plan.model.moe_layer_numbers)


def _samples(groups: list[SampleGroup]) -> tuple[list[Sample], list[float]]:
    """Samples and their advantages."""
    advantages = [a for g in groups if g.advantages is not None for a in g.advantages.tolist()]
    return [sample for group in groups for sample in group.samples], advantages
