"""The loop: one step of every rank is sync, rollout, score, learn, log.

It joins the rooms by passing values; nothing here knows Megatron or SGLang. `mrl.collect` decides where
the engines are; on the trainer's own devices they and the trainer take turns (`mrl/collect/sync.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mrl.collect.base import Collector
from mrl.collect.evaluation import evaluate
from mrl.collect.live import LiveCollector
from mrl.collect.saved import SavedCollector
from mrl.data.completions import completions
from mrl.diagnosis.collect import Diagnosis
from mrl.disaggregated.collector import DisaggregatedCollector
from mrl.disaggregated.free_collector import FreeCollector
from mrl.exchange.rollouts import RolloutExchange
from mrl.exchange.sharing import gather_lines
from mrl.learn.advantages import count_loss_tokens, set_reward_advantages, shaping_metrics
from mrl.learn.critic import make_critic
from mrl.learn.learner import Learner
from mrl.learn.policy import make_policy
from mrl.learn.rollout_metrics import episode_metrics, rollout_metrics, source_metrics
from mrl.learn.saves import has_lost_a_save, make_checkpoints, make_snapshots
from mrl.learn.sft import run_sft
from mrl.learn.throughput import Throughput
from mrl.preflight import Plan
from mrl.preflight.data_position import why_other_data
from mrl.run import console
from mrl.run.activities import idle_shares
from mrl.run.callbacks import Callback
from mrl.run.folder import RunFolder, rollout_lines, saved_step
from mrl.run.rollouts import is_held, save_groups
from mrl.system.clock import Clock
from mrl.system.profiler import profiled
from mrl.system.stop import StopRequest, left, left_early
from mrl.trackers import Trackers
from mrl.types import Max, SampleGroup, Statistics
from parallel.checkpoint.checkpoints import Loaded
from parallel.ledger import device_memory, memory_statistics
from parallel.mesh import Mesh
from parallel.policy import Policy
from parallel.reduce import reduce_statistics


@dataclass
class Trainer:
    """Runs one recipe on one rank. `train()` goes from the last checkpoint to the last step."""

    plan: Plan
    mesh: Mesh
    folder: RunFolder
    callbacks: Sequence[Callback] = ()
    """What is told of every step, in order, on every rank."""
    name: str = ""
    """Which of several runs in one process it is."""

    def __post_init__(self) -> None:
        recipe = self.plan.recipe
        self.is_main = self.mesh.rank == 0
        self.step = 0
        """Steps done."""
        self._first_step = 0
        """The first step of this start."""
        self.stopped = ""
        """Why the run stopped before its last step; empty where it did not."""
        self._stop = StopRequest(recipe.checkpoint.stop_limit_s, self.folder.saved_step)
        with ExitStack() as undo:  # what was made is let go of where the rest cannot be made
            with self._progress("loading the model"):
                self.policy = self._make_policy()
            undo.callback(self.policy.close)
            self.collector = self._make_collector()
            undo.callback(self.collector.close)
            self.exchange = RolloutExchange(self.mesh, self.policy.moe_layers)
            diagnosis = Diagnosis(
                recipe, self.plan.model, self.plan.tokenizer, self.mesh, self.policy, self.folder
            )
            self.critic = make_critic(self.plan.critic, recipe, self.policy, self.mesh)
            self.learner = Learner(
                recipe,
                self.plan.algorithm,
                len(self.plan.model.moe_layer_numbers),
                self.mesh,
                self.policy,
                self.exchange,
                diagnosis,
                self.critic,
            )
            self.checkpoints = make_checkpoints(recipe, self.mesh, self.folder)
            self.snapshots = make_snapshots(recipe, self.mesh, self.folder)
            self.trackers = Trackers(recipe, self.folder, is_main=self.is_main)
            models = [model for model in (self.plan.model, self.plan.critic) if model is not None]
            self.throughput = Throughput.of_device(
                self.mesh.device, dist.get_world_size(), models, self.plan.adapter
            )
            undo.pop_all()

    def _make_policy(self, **shared: Any) -> Policy:
        plan, shared = self.plan, {"reference": self.plan.reference, **shared}
        return make_policy(plan.recipe, plan.model, self.mesh, plan.adapter, trains=True, **shared)

    def _make_collector(self) -> Collector:
        return make_collector(self.plan, self.mesh, self.folder)

    def train(self) -> None:
        """Run all steps that are left. Whatever happens, no engine is left running.

        A signal (SIGUSR1, SIGTERM, SIGHUP) and a callback that asks for it save at the end of the step
        and stop: `stopped` says why. A signal before the first step of this start stops without a save,
        as nothing was trained.
        """
        with self._stop.heeding_signals():
            self._train()

    def _train(self) -> None:
        recipe = self.plan.recipe
        try:
            if not self._leaves_early(self.plan.resume_step or 0):
                self.begin()
                self._leaves_early(self.step)
            while self.step < recipe.train.num_steps and not self.stopped:
                with profiled(recipe.profile, self.folder.root, self.step, self.mesh.rank):
                    metrics = self.run_step()
                self.record_step(metrics)
            if recipe.eval.every and not self.stopped:
                self._evaluate_last()
            self.checkpoints.finish()
            self.snapshots.close()
        except BaseException:
            self.checkpoints.rescue()
            raise
        finally:
            self.collector.close()
            self.trackers.close(failed=self.step < recipe.train.num_steps)

    def leave(self) -> None:
        """Save the steps that are done, where no checkpoint has them yet, and wait for what is being
        written. A collective."""
        self.checkpoints.finish()
        saved = [self.folder.saved_step()]
        dist.broadcast_object_list(saved)
        if saved[0] != self.step:
            self._save()
            self.checkpoints.finish()
        self.snapshots.close()

    def close(self) -> None:
        """Let go of the weights, for a process that lives on."""
        for model in (self.policy, self.critic):
            if model is not None:
                model.close()

    def begin(self) -> None:
        """Start the engines, and go back to the newest checkpoint or through the supervised steps."""
        self.snapshots.open(self.policy, self.critic)
        with self._progress(self.collector.start_text):
            self.collector.start(self.policy)
        self._restore_or_run_sft()

    def _restore_or_run_sft(self) -> None:
        recipe = self.plan.recipe
        if (loaded := self.snapshots.load_newer(self.policy, self.critic)) is not None:
            self.resume(loaded)
            if has_lost_a_save(recipe, self.step, self.plan.checkpoint_step):
                self._save()
        elif self.plan.checkpoint_step is not None:
            self.resume(self.checkpoints.load_newest(self.policy, self.critic))
        elif recipe.sft is not None:
            with self._progress(f"SFT, {recipe.sft.num_steps} supervised steps"):
                run_sft(self.plan.sft_examples, recipe.sft, recipe, self.policy, self.mesh)
            self._save()
        if self.is_main:
            self.folder.rewind(self.step)
            self.trackers.start(self.step)

    def resume(self, loaded: Loaded) -> None:
        """Continue after a checkpoint whose weights are loaded already. A collective.

        If the rows of the data have changed since then, the data starts over at its first row.
        """
        collected, plan, why = loaded.trainer["collector"], self.plan, ""
        if self.is_main and self.folder.history.has_other_data(loaded.step):
            why = why_other_data(self.folder, plan.recipe, plan.sources, collected, loaded.step)
        other = [bool(why)]
        dist.broadcast_object_list(other)
        self.collector.load_state_dict(collected, loaded.step, other_data=other[0])
        self.learner.load_state_dict(loaded.trainer["learner"])
        self.step = self._first_step = loaded.step

    def _evaluate_last(self) -> None:
        """Evaluate the final weights, which no step generates with; only `evals/` has the result."""
        with self._progress("evaluating the final weights"):
            metrics = evaluate(self.policy, self.collector, self.step)
        if self.is_main:
            console.evaluation(metrics)
        for callback in self.callbacks:
            callback.on_evaluation(self.step, metrics)

    def _call_back(self, metrics: dict[str, float]) -> None:
        step, evaluation = int(metrics["step"]), self.collector.evaluation
        for callback in self.callbacks:
            if evaluation:
                callback.on_evaluation(step, evaluation)
            if callback.on_step(step, metrics, self.collector.groups):
                self._stop.from_callback()

    def run_step(self) -> dict[str, float]:
        """Run one step and return its metrics, which are the same on every rank but for the times."""
        clock = self.begin_step()
        while not self.collector.is_over:  # once, unless an engine is lost or prompts are replaced
            self.sync(clock)
            self.collector.rollout(clock)
            self.collector.score(clock)
        return self.learn(clock)

    def begin_step(self) -> Clock:
        """Choose the prompts of the next step, and return the clock that times its parts."""
        clock = Clock()
        self.collector.begin(self.step, clock)
        return clock

    def learn(self, clock: Clock) -> dict[str, float]:
        """Train on the groups that the collector has for this step; return the metrics of the step."""
        groups = self.collector.groups
        memory = memory_statistics("rollout", self.policy.where())
        learned: dict[str, float] = {}
        if self.plan.recipe.debug.rollout_only:
            self._write_untrained(groups)
        else:
            self.policy.onload()
            learned = self.learner.learn(self.step, groups, clock, self._write_rollouts)
            memory |= memory_statistics("train", self.policy.where())
        metrics = self._step_metrics(groups, learned, memory)
        metrics |= {f"time/{name}_s": seconds for name, seconds in clock.seconds.items()}
        metrics["time/step_s"] = clock.elapsed_s
        metrics |= self.throughput.metrics(metrics, groups) | idle_shares(metrics)
        metrics |= self.snapshots.metrics()
        metrics["time/timestamp"] = time.time()
        if engines := self.collector.engine_spans():
            self.folder.timeline.add(self.step, clock.spans, engines)
        self.step += 1
        return metrics

    def record_step(self, metrics: dict[str, float]) -> None:
        """Write the metrics of the step that ended, tell the callbacks, and save where it is due."""
        if self.is_main:
            self.folder.add_metrics(metrics)
            self.trackers.follow()
            num_steps = self.plan.recipe.train.num_steps
            is_first = self.step - 1 == self._first_step
            console.step_line(metrics, num_steps=num_steps, name=self.name, is_first=is_first)
        self._call_back(metrics)
        self.checkpoints.poll()
        self._save_if_due()

    def _step_metrics(
        self, groups: list[SampleGroup], learned: dict[str, float], memory: Statistics
    ) -> dict[str, float]:
        """Join what rollout, learner and memory measured. A collective."""
        recipe = self.plan.recipe
        metrics: dict[str, float] = {"step": self.step, **rollout_metrics(groups)}
        metrics |= source_metrics(groups)
        metrics |= shaping_metrics(groups, recipe.algorithm, recipe.rollout.max_response_len)
        if recipe.environment is not None:
            metrics |= episode_metrics(groups)
        metrics |= learned
        memory |= device_memory(self.mesh.device)
        metrics |= reduce_statistics(memory | self.collector.statistics())
        metrics["weight_version"] = max(
            sample.weight_versions[-1].version for group in groups for sample in group.samples
        )
        return metrics

    def _write_untrained(self, groups: list[SampleGroup]) -> None:
        """Write the rollouts of a step that is not trained, with the advantages of their rewards."""
        recipe = self.plan.recipe
        max_len, is_r3 = recipe.rollout.max_response_len, recipe.moe.routing_replay == "r3"
        tokens = count_loss_tokens(groups, recipe.algorithm, drops_stale=is_r3)
        set_reward_advantages(groups, tokens, self.plan.algorithm, recipe.algorithm, max_len)
        self._write_rollouts(groups)

    def sync(self, clock: Clock) -> None:
        """Bring the engines to the policy's weights; times `sync`."""
        with clock.part("sync"):
            self.collector.sync(self.policy, self.step)

    def _progress(self, text: str) -> AbstractContextManager[None]:
        return console.progress(text) if self.is_main else nullcontext()

    def _write_rollouts(self, groups: list[SampleGroup]) -> None:
        held = [i for i, group in enumerate(groups) if is_held(group)]
        own = [groups[i] for i in held]
        texts = completions(own, self.plan.tokenizer)  # each rank decodes what it rolled out
        parts = [rollout_lines(self.step, g, t) for g, t in zip(own, texts, strict=True)]
        lines = gather_lines(dict(zip(held, parts, strict=True)), len(groups))
        if lines is not None:
            self.folder.write_rollouts(self.step, lines)
        if self.plan.recipe.debug.save_rollouts:
            groups = self.exchange.collect(groups)
            if self.is_main:
                save_groups(saved_step(self.folder.rollouts, self.step), groups)

    def _save_if_due(self) -> None:
        """Save at the recipe's interval, at the last step, and when the run is to stop here."""
        recipe, every = self.plan.recipe, self.plan.recipe.checkpoint.save_every
        last = self.step == recipe.train.num_steps
        told = 0 if last else self._told_on_any_rank()
        due = last or told or (every and self.step % every == 0)
        if due and not recipe.debug.rollout_only:
            self._save()
        if self.snapshots.is_due(self.step) and not (last or told):
            self.snapshots.take(self.step, self.policy, self._own_state(), self.critic)
        if told:
            self.stopped = left(told, self.step, is_saved=not recipe.debug.rollout_only)

    def _leaves_early(self, step: int) -> bool:
        """Whether SIGUSR1 came while the run started, with `step` steps done."""
        if step < self.plan.recipe.train.num_steps and (told := self._told_on_any_rank()):
            self.stopped = left_early(told, step)
        return bool(self.stopped)

    def _told_on_any_rank(self) -> int:
        """Ranks stop together, also when only one of them was told."""
        return int(reduce_statistics({"told": Max(torch.tensor(float(self._stop.asked)))})["told"])

    def _save(self) -> None:
        self.checkpoints.save(self.step, self.policy, self._own_state(), self.critic)

    def _own_state(self) -> dict[str, Any]:
        return {"collector": self.collector.state_dict(), "learner": self.learner.state_dict()}


def make_collector(plan: Plan, mesh: Mesh, folder: RunFolder) -> Collector:
    """Return what gives the steps of a recipe their groups: saved rollouts, engines on the same
    devices, or those of rollout ranks."""
    if plan.recipe.debug.load_rollouts is not None:
        return SavedCollector(plan.recipe, mesh)
    if plan.roles.num_rollout:
        kind = FreeCollector if plan.recipe.asynchronous.is_free else DisaggregatedCollector
        return kind(plan, mesh, folder)
    return LiveCollector(plan, mesh, folder)
