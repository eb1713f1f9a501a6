"""The loop: one step of every rank is sync, rollout, score, train, log.

It joins the rooms by passing values; nothing here knows Megatron or SGLang.
"""

from __future__ import annotations

import math
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from moe.provenance import provenance_metrics
from mrl import console
from mrl.batching import make_train_batches, set_advantages, split_evenly
from mrl.collect import Clock, Collector, SavedCollector
from mrl.completions import completions
from mrl.engine_collector import EngineCollector
from mrl.exchange import RouteExchange
from mrl.metrics import episode_metrics, mismatch_statistics, rollout_metrics
from mrl.preflight import Plan
from mrl.rollout.saved import save_groups
from mrl.run_folder import RunFolder, saved_step
from mrl.types import LossOutput, Max, MicroBatch, Sample, SampleGroup, TrainBatch
from mrl.warm_start import warm_start
from parallel.checkpoint import Checkpoints
from parallel.forward import PassOutput, RecordedRoutes
from parallel.groups import Groups
from parallel.ledger import memory_statistics
from parallel.policy import Policy, with_old_logprobs, with_ref_logprobs
from parallel.reduce import merge, reduce_statistics


@dataclass
class Trainer:
    """One run on one rank. `train()` goes from the last checkpoint to the last step."""

    plan: Plan
    groups: Groups
    folder: RunFolder

    def __post_init__(self) -> None:
        recipe = self.plan.recipe
        self.is_main = self.groups.rank == 0
        self.step = 0
        """Steps done."""
        self._interrupted = False
        with self._progress("loading the model"):
            self.policy = Policy(
                self.plan.model,
                self.groups,
                recipe.model,
                recipe.optimizer,
                recompute=recipe.train.recompute,
                temperature=recipe.rollout.temperature,
                reference=self.plan.reference,
                moe=recipe.moe,
            )
        self.collector = self._make_collector()
        self.exchange = RouteExchange(self.groups, self.policy.moe_layers)
        self.checkpoints = Checkpoints(
            self.folder.checkpoints,
            self.groups,
            keep=recipe.checkpoint.keep,
            async_save=recipe.checkpoint.async_save,
            seed=recipe.seed,
            warn=console.warning if self.is_main else lambda text: None,
        )

    def _make_collector(self) -> Collector:
        saved = self.plan.recipe.debug.load_rollouts
        if saved is not None:
            return SavedCollector(saved, self.groups)
        return EngineCollector(self.plan, self.groups, self.folder)

    def train(self) -> None:
        """Run all steps that are left. Whatever happens, no engine is left running.

        SIGUSR1 (SLURM's warning before the time limit) saves at the end of the step and leaves.
        """
        recipe = self.plan.recipe
        signal.signal(signal.SIGUSR1, self._on_signal)
        try:
            with self._progress(self.collector.start_text):
                self.collector.start(self.policy)
            self._restore_or_warm_start()
            while self.step < recipe.train.num_steps:
                metrics = self.run_step()
                if self.is_main:
                    self.folder.add_metrics(metrics)
                    console.step_line(metrics, num_steps=recipe.train.num_steps)
                self.checkpoints.poll()
                self._save_if_due()
            self.checkpoints.finish()
        except BaseException:
            self.checkpoints.rescue()
            raise
        finally:
            self.collector.close()

    def _restore_or_warm_start(self) -> None:
        recipe = self.plan.recipe
        if self.plan.resume_step is not None:
            loaded = self.checkpoints.load_newest(self.policy)
            self.collector.load_state_dict(loaded.trainer["collector"])
            self.step = loaded.step
        elif recipe.warm_start is not None:
            text = f"warm start, {recipe.warm_start.num_steps} supervised steps"
            with self._progress(text):
                warm_start(self.plan, recipe.warm_start, self.policy, self.groups)
            self._save()
        if self.is_main:
            self.folder.rewind(self.step)

    def run_step(self) -> dict[str, float]:
        """One step; returns its metrics, the same on every rank but for the times."""
        start, clock, recipe = time.perf_counter(), Clock(), self.plan.recipe
        groups = self.collector.collect(self.step, self.policy, clock)
        memory = memory_statistics("rollout", self.policy.ledger.where())
        set_advantages(groups, self.plan.algorithm, recipe.algorithm)
        self._write_rollouts(groups)  # first: a batch that breaks the update must be on file
        metrics: dict[str, float] = {"step": self.step, **rollout_metrics(groups)}
        if recipe.environment is not None:
            metrics |= episode_metrics(groups)
        if not recipe.debug.rollout_only:
            metrics |= self._learn(groups, clock)
            memory |= memory_statistics("train", self.policy.ledger.where())
        metrics |= reduce_statistics(memory | self.collector.statistics())
        metrics["weight_version"] = max(
            sample.weight_versions[-1].version for group in groups for sample in group.samples
        )
        metrics |= {f"time/{name}_s": seconds for name, seconds in clock.seconds.items()}
        metrics["time/step_s"] = time.perf_counter() - start
        self.step += 1
        return metrics | _memory(self.groups.device)

    def _learn(self, groups: list[SampleGroup], clock: Clock) -> dict[str, float]:
        """Old (and reference) log-probs, then one optimizer step per mini-batch."""
        recipe, algorithm = self.plan.recipe, self.plan.algorithm
        self.policy.onload()
        replays_rollout = recipe.moe.routing_replay == "r3"
        batches = make_train_batches(
            [_samples(part) for part in split_evenly(groups, recipe.train.num_steps_per_rollout)],
            algorithm,
            self.groups,
            recipe.train.micro_batch_tokens,
            self.exchange.deliver if replays_rollout else None,
        )
        flat = [micro for batch in batches for micro in batch.micro_batches]
        replay: RecordedRoutes | bool = replays_rollout
        with clock.part("logprob"):
            old = self.policy.logprobs(flat, replay)
        if recipe.moe.routing_replay == "r2":
            replay = old.native_routes
        flat = with_old_logprobs(flat, old)
        if recipe.algorithm.kl_coef:
            with clock.part("ref_logprob"), self.policy.reference():
                flat = with_ref_logprobs(flat, self.policy.logprobs(flat, replay))

        def loss(logprobs: torch.Tensor, batch: MicroBatch) -> LossOutput:
            return algorithm.loss(logprobs, batch, recipe.algorithm)

        steps = []
        with clock.part("train"):
            done = 0
            for batch in batches:
                share = slice(done, done + len(batch.micro_batches))
                done = share.stop
                routes = replay if isinstance(replay, bool) else replay[share]
                ready = TrainBatch(flat[share], batch.num_loss_tokens, batch.num_samples)
                steps.append(self.policy.train_step(ready, loss, routes))
        metrics = self._learning_metrics(flat, old, steps)
        if replays_rollout:
            metrics |= provenance_metrics(_samples(groups)[0])
            metrics["routing/wire_bytes_per_token"] = self.exchange.bytes_per_token
        return metrics

    def _learning_metrics(
        self, flat: list[MicroBatch], old: PassOutput, steps: list[Any]
    ) -> dict[str, float]:
        trained = merge([step.stats for step in steps])
        coverage = "routing/replay_coverage"
        # Disagreement is measured before the update; coverage must hold in every pass.
        before = {k: v for k, v in old.routing.items() if k != coverage}
        after = {k: v for k, v in trained.items() if k == coverage or k not in before}
        both = merge([{k: v for k, v in s.items() if k == coverage} for s in (old.routing, after)])
        mismatch = mismatch_statistics(flat, old) if self.groups.reports_loss else {}
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

    def _progress(self, text: str) -> AbstractContextManager[None]:
        return console.progress(text) if self.is_main else nullcontext()

    def _write_rollouts(self, groups: list[SampleGroup]) -> None:
        saves = self.plan.recipe.debug.save_rollouts
        if saves:
            groups = self.exchange.collect(groups)
        if not self.is_main:
            return
        self.folder.write_rollouts(self.step, groups, completions(groups, self.plan.tokenizer))
        if saves:
            save_groups(saved_step(self.folder.rollouts, self.step), groups)

    def _save_if_due(self) -> None:
        """Save at the recipe's interval, at the last step, and when SIGUSR1 came: then leave."""
        recipe = self.plan.recipe
        every = recipe.checkpoint.save_every
        last = self.step == recipe.train.num_steps
        told = self._any_rank_interrupted() and not last
        due = last or told or (every and self.step % every == 0)
        if due and not recipe.debug.rollout_only:
            self._save()
        if told and recipe.debug.rollout_only:
            raise SystemExit(
                f"mrl: SIGUSR1: stopped after step {self.step}; debug.rollout_only saves no "
                "checkpoint, another start begins anew"
            )
        if told:
            self.checkpoints.finish()
            raise SystemExit(f"mrl: SIGUSR1: saved step {self.step}; start again to go on")

    def _on_signal(self, number: int, frame: Any) -> None:
        self._interrupted = True

    def _any_rank_interrupted(self) -> bool:
        """Ranks leave together, also when only one of them was told."""
        told = Max(torch.tensor(float(self._interrupted)))
        return reduce_statistics({"told": told})["told"] > 0

    def _save(self) -> None:
        own = {"collector": self.collector.state_dict()}
        self.checkpoints.save(self.step, self.policy, own)


def _samples(groups: list[SampleGroup]) -> tuple[list[Sample], list[float]]:
    """Samples and their advantages."""
    advantages = [a for g in groups if g.advantages is not None for a in g.advantages.tolist()]
    return [sample for group in groups for sample in group.samples], advantages


def _memory(device: torch.device) -> dict[str, float]:
    """GPU memory of this rank in bytes; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory/allocated_bytes": float(torch.cuda.memory_allocated(device)),
        "memory/peak_bytes": float(peak),
    }
