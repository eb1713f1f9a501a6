"""The training loop of a recipe. On every rank, a step consists of sync, rollout, score, learn and log.

The loop passes values between the packages and does not depend on Megatron or SGLang itself. The
collector decides where the engines run. If they run on the trainer's own devices, engines and
trainer take turns (`mrl/engine_pool/local.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mrl.collect.collector import Collector, evaluate
from mrl.collect.saved import SavedCollector
from mrl.data.completions import completions
from mrl.diagnosis.collect import Diagnosis
from mrl.engine_pool.local import make_local_collector
from mrl.engine_pool.remote.steps import make_remote_collector
from mrl.exchange.rollouts import RolloutExchange
from mrl.exchange.sharing import gather_lines
from mrl.learn.learner import Learner
from mrl.learn.models import make_critic, make_policy
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
from mrl.run.profiler import profiled
from mrl.run.rollouts import is_held, save_groups
from mrl.system.clock import Clock
from mrl.system.stop import StopRequest, stopped_at, stopped_early
from mrl.trackers import Trackers
from mrl.types import Max, SampleGroup, Statistics
from parallel.checkpoint.checkpoints import Loaded
from parallel.ledger import device_memory, memory_statistics
from parallel.lora.shared_base import SharedBase
from parallel.mesh import Mesh
from parallel.policy import Policy
from parallel.reduce import reduce_statistics


@dataclass
class Trainer:
    """Runs one recipe on one rank. `train` continues from the newest checkpoint to the last step."""

    plan: Plan
    mesh: Mesh
    folder: RunFolder
    callbacks: Sequence[Callback] = ()
    """Called after every step, in order, on every rank."""
    name: str = ""
    """The name of the run if several runs share the process, else empty."""
    base: SharedBase | None = None  # the service's base model, if the policy is an adapter
    make_collector: Callable[[Plan, Mesh, RunFolder], Collector | SavedCollector] | None = None
    """The function that makes the collector; None selects `make_collector` of this module."""

    def __post_init__(self) -> None:
        recipe = self.plan.recipe
        self.is_main = self.mesh.rank == 0
        self.step = 0
        """The number of steps done."""
        self._first_step = 0
        """The number of steps done when this process started."""
        self.stopped = ""
        """Why the run stopped before its last step; empty if it did not."""
        self._stop = StopRequest(recipe.checkpoint.stop_limit_s, self.folder.saved_step)
        with ExitStack() as undo:  # release what was built if a later step fails
            with self._progress("loading the model"):
                self.policy = self._make_policy()
            undo.callback(self.policy.close)
            make = self.make_collector or make_collector
            self.collector = make(self.plan, self.mesh, self.folder)
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

    def _make_policy(self) -> Policy:
        plan, options = self.plan, {"base": self.base, "name": self.name} if self.base else {}
        options["reference"] = plan.reference
        return make_policy(plan.recipe, plan.model, self.mesh, plan.adapter, trains=True, **options)

    def train(self) -> None:
        """Run the remaining steps, then stop the engines, even after an exception.

        If a signal (SIGUSR1, SIGTERM, SIGHUP) or a callback requests a stop, the run stops at the
        end of the step and saves, unless `debug.rollout_only` is set. `stopped` then has the reason.
        A signal that arrives before this process has run a step stops the run without a save.
        """
        with self._stop.handling_signals():
            self._train()

    def _train(self) -> None:
        recipe = self.plan.recipe
        try:
            if not self._stops_before_training(self.plan.resume_step or 0):
                self.begin()
                self._stops_before_training(self.step)
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
        """Save the current step, unless the newest checkpoint already has it, and wait until all
        saves are written. A collective."""
        self.checkpoints.finish()
        saved = [self.folder.saved_step()]
        dist.broadcast_object_list(saved)
        if saved[0] != self.step:
            self._save()
            self.checkpoints.finish()
        self.snapshots.close()

    def close(self) -> None:
        """Release the memory of the policy and the critic, so that the process can do other work."""
        for model in (self.policy, self.critic):
            if model is not None:
                model.close()

    def begin(self) -> None:
        """Start the engines, then load the newest snapshot or checkpoint. If the run has neither,
        run the recipe's SFT steps, if there are any."""
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
        """Continue from a checkpoint after its weights were loaded. A collective.

        If the rows of the data have changed since the save, reading starts again at the first row.
        """
        collected, plan, reason = loaded.trainer["collector"], self.plan, ""
        if self.is_main and self.folder.history.may_have_other_rows(loaded.step):
            reason = why_other_data(self.folder, plan.recipe, plan.sources, collected, loaded.step)
        has_other_data = [bool(reason)]
        dist.broadcast_object_list(has_other_data)
        self.collector.load_state_dict(collected, loaded.step, other_data=has_other_data[0])
        self.learner.load_state_dict(loaded.trainer["learner"])
        self.step = self._first_step = loaded.step

    def _evaluate_last(self) -> None:
        """Evaluate the final weights, which no step has used for rollouts. The console, the
        callbacks and `evals/` get the result, but metrics.jsonl does not."""
        with self._progress("evaluating the final weights"):
            metrics = evaluate(self.policy, self.collector, self.step)
        if self.is_main:
            console.evaluation(metrics)
        for callback in self.callbacks:
            callback.on_evaluation(self.step, metrics)

    def _call_back(self, metrics: dict[str, float]) -> None:
        """Call every callback with the step's metrics, and with its evaluation if it had one. A
        callback whose `on_step` returns true requests a stop of the run."""
        step, evaluation = int(metrics["step"]), self.collector.evaluation
        for callback in self.callbacks:
            if evaluation:
                callback.on_evaluation(step, evaluation)
            if callback.on_step(step, metrics, self.collector.groups):
                self._stop.from_callback()

    def run_step(self) -> dict[str, float]:
        """Run one step and return its metrics, which are the same on every rank except for times."""
        clock = self.begin_step()
        while not self.collector.is_over:  # repeats if an engine is lost or prompts are replaced
            self.sync(clock)
            self.collector.rollout(clock)
            self.collector.score(clock)
        return self.learn(clock)

    def begin_step(self) -> Clock:
        """Choose the prompts of the next step; return the clock that times the parts of the step."""
        clock = Clock()
        self.collector.begin(self.step, clock)
        return clock

    def learn(self, clock: Clock) -> dict[str, float]:
        """Train on the collector's groups for this step and return the step's metrics. With
        `debug.rollout_only`, record the groups without training on them."""
        groups = self.collector.groups
        memory = memory_statistics("rollout", self.policy.where())
        if self.plan.recipe.debug.rollout_only:
            learned = self.learner.record_untrained(groups, self._write_rollouts)
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
        """Write the metrics of the step that ended, call the callbacks, and save if a save is due."""
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
        """Return all metrics of the step: rollout, learner, memory and collector. A collective."""
        recipe = self.plan.recipe
        metrics: dict[str, float] = {"step": self.step, **rollout_metrics(groups)}
        metrics |= source_metrics(groups)
        if recipe.environment is not None:
            metrics |= episode_metrics(groups)
        metrics |= learned
        memory |= device_memory(self.mesh.device)
        metrics |= reduce_statistics(memory | self.collector.statistics())
        metrics["weight_version"] = max(
            sample.weight_versions[-1].version for group in groups for sample in group.samples
        )
        return metrics

    def sync(self, clock: Clock) -> None:
        """Send the policy's weights to the engines, and record the time under `sync`."""
        with clock.part("sync"):
            self.collector.sync(self.policy, self.step)

    def _progress(self, text: str) -> AbstractContextManager[None]:
        return console.progress(text, name=self.name) if self.is_main else nullcontext()

    def _write_rollouts(self, groups: list[SampleGroup]) -> None:
        """Write rollouts/step_*.jsonl and, with `debug.save_rollouts`, all tensors. A collective."""
        numbers = [i for i, group in enumerate(groups) if is_held(group)]
        own = [groups[i] for i in numbers]
        texts = completions(own, self.plan.tokenizer)  # each rank decodes what it rolled out
        parts = [rollout_lines(self.step, g, t) for g, t in zip(own, texts, strict=True)]
        lines = gather_lines(dict(zip(numbers, parts, strict=True)), len(groups))
        if lines is not None:
            self.folder.write_rollouts(self.step, lines)
        if self.plan.recipe.debug.save_rollouts:
            groups = self.exchange.collect(groups)
            if self.is_main:
                save_groups(saved_step(self.folder.rollouts, self.step), groups)

    def _save_if_due(self) -> None:
        """Save a checkpoint if the recipe's interval has passed, the last step is done, or a stop
        was requested; but never with `debug.rollout_only`. Take a snapshot if one is due and the
        run continues."""
        recipe, every = self.plan.recipe, self.plan.recipe.checkpoint.save_every
        is_last = self.step == recipe.train.num_steps
        request = 0 if is_last else self._stop_request()
        is_due = is_last or request or (every and self.step % every == 0)
        if is_due and not recipe.debug.rollout_only:
            self._save()
        if self.snapshots.is_due(self.step) and not (is_last or request):
            self.snapshots.take(self.step, self.policy, self._state(), self.critic)
        if request:
            self.stopped = stopped_at(request, self.step, is_saved=not recipe.debug.rollout_only)

    def _stops_before_training(self, step: int) -> bool:
        """Return whether a signal stops the run before this process runs a step; `stopped` is then
        set to the reason. `step` is the number of steps that the run has done so far."""
        if step < self.plan.recipe.train.num_steps and (request := self._stop_request()):
            self.stopped = stopped_early(request, step)
        return bool(self.stopped)

    def _stop_request(self) -> int:
        """Return who asked the run to stop, as a number (`mrl.system.stop.WHO`); 0 if nobody did.
        If the ranks differ, the largest number is returned. A collective."""
        asked = Max(torch.tensor(float(self._stop.source)))
        return int(reduce_statistics({"asked": asked})["asked"])

    def _save(self) -> None:
        self.checkpoints.save(self.step, self.policy, self._state(), self.critic)

    def _state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores besides weights and optimizers."""
        return {"collector": self.collector.state_dict(), "learner": self.learner.state_dict()}


def make_collector(plan: Plan, mesh: Mesh, folder: RunFolder) -> Collector | SavedCollector:
    """Return the source of each step's sample groups: saved rollouts, engines on the trainer's
    devices, or engines on separate rollout ranks."""
    if plan.recipe.debug.load_rollouts is not None:
        return SavedCollector(plan.recipe, mesh)
    make = make_remote_collector if plan.roles.num_rollout else make_local_collector
    return make(plan, mesh, folder)
