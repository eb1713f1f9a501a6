"""This module collects a step's groups in a live run: prompts, engines, rewards.

The first rank of each engine's ranks leads it; all ranks take part in the weight syncs. An engine that
is lost in the middle of a step is replaced: what it had finished is kept, the other ranks wait, all of
them send the weights once more, and the remaining samples are generated with the same seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mrl.collect.backlog import Backlog, Started, StepPrompts
from mrl.collect.dynamic_sampling import DynamicSampling
from mrl.collect.engine_nodes import make_engine
from mrl.collect.engine_profile import engine_profiled
from mrl.collect.engine_slot import EngineSlot
from mrl.collect.evaluation import Evaluation, Evaluator
from mrl.collect.scoring import Scoring
from mrl.collect.sync import WeightSync
from mrl.collect.task import Task, make_task, share_partial, share_scored
from mrl.data import PromptCursor
from mrl.exchange.rollouts import RolloutExchange
from mrl.exchange.sharing import sum_over_ranks
from mrl.preflight import Plan
from mrl.rollout.base import RolloutEngine
from mrl.rollout.engine_group import EngineGroup
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.system.clock import Clock
from mrl.system.heartbeat import begin_step, phase
from mrl.system.memory_watch import MemoryWatch
from mrl.types import Max, SampleGroup, Statistics
from parallel.mesh import Mesh
from parallel.policy import Policy


@dataclass
class _Round:
    """Holds what the engines generate between two scorings, as one rank sees it."""

    prompts: StepPrompts | None
    """None in an evaluation on its own."""
    task: Task | None
    """This rank's part of `prompts`; None where it leads no engine."""
    evaluation: Evaluation | None = None
    is_generated: bool = False
    """Whether no engine, on any rank, has anything left to generate."""

    @property
    def remaining(self) -> list[Task]:
        """The tasks of this rank's engine that are not over."""
        tasks = [self.task] if self.task is not None else []
        tasks += self.evaluation.tasks if self.evaluation is not None else []
        return [task for task in tasks if not task.is_over]


class LiveCollector:
    """Collects the groups of a live run. See `mrl.collect.base.Collector`."""

    start_text = "starting the rollout engine"

    def __init__(self, plan: Plan, mesh: Mesh, folder: RunFolder) -> None:
        recipe = plan.recipe
        self.plan, self.mesh, self._folder = plan, mesh, folder
        self.cursor = PromptCursor(plan.sources, seed=recipe.seed, shuffle=recipe.data.shuffle)
        tp = recipe.rollout.tensor_parallel_size
        self.engine_number = mesh.rank // tp
        group = EngineGroup.create(
            mesh.rank, dist.get_world_size(), tp, timeout_s=recipe.longest_wait_s
        )
        self.slot = EngineSlot(
            make_engine(plan, mesh, folder, group.exchange),
            self.engine_number,
            recipe.rollout.max_restarts,
            MemoryWatch(mesh.device, console.warning),
        )
        self.weight_sync = WeightSync(recipe.rollout, recipe.model, plan.prompts, self.slot, group)
        self.backlog = Backlog(recipe.rollout)
        self.exchange = RolloutExchange(mesh)
        """Moves groups that wait for another step to the engine that continues them."""
        leads = self.slot.engine is not None
        self.scoring = Scoring(recipe, plan.tokenizer) if leads else None
        self.evaluator = Evaluator(plan, mesh, folder, self.engine_number if leads else None)
        self.groups: list[SampleGroup] = []
        self.evaluation: dict[str, float] = {}
        self._round: _Round | None = None
        self._step, self._seed = 0, 0
        self._dynamic_sampling: DynamicSampling | None = None
        self._numbers: dict[str, float] = {}

    @phase("start")
    def start(self, policy: Policy) -> None:
        # The engine sizes its KV cache by the memory that it finds free now.
        policy.offload_optimizer()
        policy.offload_parameters()
        dist.barrier()
        self.slot.start()
        dist.barrier()
        policy.onload()

    def begin(self, step: int, clock: Clock) -> None:
        recipe = self.plan.recipe
        begin_step(step)
        self._begin()
        self._step, self._seed = step, recipe.seed * 1_000_003 + step
        if recipe.algorithm.dynamic_sampling:
            self._dynamic_sampling = DynamicSampling(recipe.rollout)
        prompts = self._with_tokens(self.backlog.begin_step(self.cursor.next, self._seed))
        is_due = bool(recipe.eval.every) and step % recipe.eval.every == 0
        evaluation = self.evaluator.begin(step) if is_due else None
        self._begin_round(_Round(prompts, self._local_task(prompts), evaluation))

    def begin_evaluation(self, version: int) -> None:
        self._begin()
        self._begin_round(_Round(None, None, self.evaluator.begin(version)))

    def _begin(self) -> None:
        self.slot.begin_step()
        self.weight_sync.begin_step()
        self._dynamic_sampling, self._numbers, self.evaluation = None, {}, {}
        self.groups = []  # those of the step before, with their routes, leave the host's memory

    def _begin_round(self, started: _Round) -> None:
        self._round = started
        self.slot.is_needed = bool(started.remaining)

    @property
    def is_over(self) -> bool:
        return self._round is None

    @phase("rollout")
    def rollout(self, clock: Clock) -> None:
        assert self._round is not None
        engine = self.slot.engine
        if engine is not None and self.slot.is_active:
            with self.slot.noting_loss(), self._profiled(engine):
                for task in self._round.remaining:
                    with clock.part(task.clock_name):
                        task.run(engine)  # groups are scored as they finish
            with clock.part("rollout"):
                self.slot.sleep()
        was_lost = self.slot.replace_lost(clock)
        self.slot.is_needed = bool(self._round.remaining)
        self._round.is_generated = not (was_lost and sum_over_ranks(self.slot.is_needed))

    def _profiled(self, engine: RolloutEngine) -> AbstractContextManager[None]:
        if self._round is None or self._round.prompts is None:  # an evaluation on its own
            return nullcontext()
        root, step = self._folder.root, self._step
        return engine_profiled(self.plan.recipe.profile, root, step, engine, self.engine_number)

    @phase("score")
    def score(self, clock: Clock) -> None:
        ended = self._round
        assert ended is not None
        if not ended.is_generated:
            return  # an engine was lost: what it left is generated first
        self._round = None
        if ended.prompts is None:
            self._evaluate(ended, clock)
            return
        recipe = self.plan.recipe
        with clock.part("score"):
            groups = share_scored(ended.task, recipe, self.mesh)
            resumes = recipe.rollout.partial_rollouts == "resume"
            partial = share_partial(ended.task, self.mesh) if resumes else []
        if self._dynamic_sampling is None or not self._dynamic_sampling.num_rounds:
            self._numbers |= self.backlog.end_step(ended.prompts, groups, partial, self._step)
            self._evaluate(ended, clock)
        if self._dynamic_sampling is None:
            self.groups = groups
        else:
            self._sample_further(self._dynamic_sampling, groups)

    def _evaluate(self, ended: _Round, clock: Clock) -> None:
        if ended.evaluation is not None:
            with clock.part("eval"):
                self.evaluation = ended.evaluation.finish()

    def _sample_further(self, sampling: DynamicSampling, groups: list[SampleGroup]) -> None:
        """Take in the groups of a round; begin another one where groups are missing."""
        sampling.add(groups)
        if not sampling.is_over:
            prompts = sampling.next_round(self.cursor.next, self._seed)
            self._begin_round(_Round(prompts, self._local_task(prompts)))
            return
        if sampling.num_missing and self.mesh.rank == 0:
            console.warning(f"step {self._step}: {sampling.complaint()}")
        self.groups = sampling.result()
        self._numbers |= sampling.metrics()
        self._dynamic_sampling = None  # the groups that it replaced leave the host's memory

    def statistics(self) -> Statistics:
        numbers = {**self._numbers, **self.evaluation}
        counts = self.slot.metrics() | self.weight_sync.metrics()
        return as_statistics(numbers | counts) | self.slot.watch.metrics()

    def _local_task(self, prompts: StepPrompts) -> Task | None:
        """Return this engine's share of the prompts; None where this rank leads no engine."""
        if self.scoring is None:
            return None
        started, num_wanted = prompts.share(self.engine_number, self.plan.num_engines)
        return make_task(
            self.plan.recipe.rollout,
            self.scoring,
            [one.group for one in started],
            [one.seed for one in started],
            num_wanted,
            tokenizer=self.plan.tokenizer,
            context_len=self.plan.context_len,
            clock_name="rollout",
            template_kwargs=self.plan.recipe.data.chat_template_kwargs,
        )

    def _with_tokens(self, prompts: StepPrompts) -> StepPrompts:
        """Return the prompts with resumed groups whole on the engines that continue them."""
        resumed, fresh = (
            prompts.started[: prompts.num_resumed],
            prompts.started[prompts.num_resumed :],
        )
        tp, num_engines = self.plan.recipe.rollout.tensor_parallel_size, self.plan.num_engines
        leaders = [(i % num_engines) * tp for i in range(len(resumed))]
        moved = self.exchange.move([one.group for one in resumed], leaders)
        whole = [Started(group, one.seed) for group, one in zip(moved, resumed, strict=True)]
        return dataclasses.replace(prompts, started=[*whole, *fresh])

    def state_dict(self) -> dict[str, Any]:
        waiting = self.exchange.collect([one.group for one in self.backlog.waiting])
        backlog = self.backlog.state_dict(waiting) if self.mesh.rank == 0 else {}
        return {**self.cursor.state_dict(), "backlog": backlog}

    def load_state_dict(self, state: dict[str, Any], *, other_data: bool = False) -> None:
        if other_data:  # what waits was drawn from the old data
            return
        self.cursor.load_state_dict(state)
        self.backlog.load_state_dict(state["backlog"])

    def close(self) -> None:
        try:
            self.slot.stop()
        finally:
            if self.scoring is not None:
                self.scoring.close()
            self.evaluator.close()


def as_statistics(numbers: Mapping[str, float]) -> Statistics:
    """Return statistics of numbers that are the same on every rank."""
    return {key: Max(torch.tensor(value, dtype=torch.float64)) for key, value in numbers.items()}
