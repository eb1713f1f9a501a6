"""This module collects a step's groups from engines on the trainer's own devices.

The first rank of each engine's ranks leads it; all ranks take part in the weight syncs. An engine that
is lost in the middle of a step is replaced: what it had finished is kept, the other ranks wait, all of
them send the weights once more, and the remaining samples are generated with the same seeds.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch.distributed as dist

from mrl.collect.backlog import Started, StepPrompts
from mrl.collect.engine_nodes import make_engine, served_adapter
from mrl.collect.engine_profile import engine_profiled
from mrl.collect.engine_slot import EngineSlot
from mrl.collect.evaluation import EvalTasks, Evaluation
from mrl.collect.rounds import Round, RoundCollector, as_statistics
from mrl.collect.scoring import Scoring
from mrl.collect.sync import WeightSync, sync_weights
from mrl.collect.task import Task, make_step_task
from mrl.exchange.rollouts import RolloutExchange
from mrl.exchange.sharing import failing_together, sum_over_ranks
from mrl.preflight import Plan
from mrl.rewards.budget import Budget
from mrl.rollout.base import RolloutEngine
from mrl.rollout.engine_group import EngineGroup
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.system.clock import Clock
from mrl.system.heartbeat import phase
from mrl.system.memory_watch import MemoryWatch
from mrl.system.worker_user import WorkerUser
from mrl.types import SampleGroup, Statistics
from parallel.mesh import Mesh
from parallel.policy import Policy


class LiveCollector(RoundCollector):
    """Collects the groups of a colocated run. See `mrl.collect.base.Collector`."""

    start_text = "starting the rollout engine"

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        folder: RunFolder,
        place: tuple[EngineSlot, EngineGroup] | None = None,
        user: WorkerUser | None = None,
    ) -> None:
        """`place`: this rank's engine and the ranks that it spans, where others have made it. `user`:
        as whom rewards and environments run; None is that of this process."""
        super().__init__(plan, mesh, folder)
        recipe = plan.recipe
        self.engine_number = mesh.rank // recipe.rollout.tensor_parallel_size
        self.slot, group = place or make_place(plan, mesh, folder)
        self.weight_sync = WeightSync(
            recipe.rollout,
            recipe.model,
            plan.prompts,
            self.slot,
            group,
            sends_adapter=served_adapter(plan) is not None,
        )
        self.exchange = RolloutExchange(mesh)
        """Moves groups that wait for another step to the engine that continues them."""
        leads = self.slot.engine is not None
        self.budget = Budget()
        """What rewards and environments may take in a step; nothing limits them in a run of its own."""
        self.scoring: Scoring | None = None
        self.eval_tasks: EvalTasks | None = None
        with ExitStack() as undo:
            undo.callback(self.close)
            with failing_together():
                if leads:
                    self.scoring = Scoring(recipe, plan.tokenizer, self.budget, user)
                    self.eval_tasks = EvalTasks(plan, self.engine_number, self.budget, user)
            undo.pop_all()

    @phase("start")
    def start(self, policy: Policy) -> None:
        # The engine sizes its KV cache by the memory that it finds free now.
        policy.offload_optimizer()
        policy.offload_parameters()
        dist.barrier()
        self.slot.start()
        dist.barrier()
        policy.onload()

    def sync(self, policy: Policy, version: int) -> None:
        sync_weights(policy, self.weight_sync, version)

    def _forget(self) -> None:
        super()._forget()
        self.budget.begin_step()
        self.slot.begin_step()
        self.weight_sync.begin_step()

    def _step_prompts(self) -> StepPrompts:
        return self._with_tokens(super()._step_prompts())

    def _new_round(self, prompts: StepPrompts | None, evaluates: int | None = None) -> Round:
        task = self._local_task(prompts) if prompts is not None else None
        evaluation = self._new_evaluation(evaluates) if evaluates is not None else None
        tasks = [*([task] if task else []), *(evaluation.tasks if evaluation else [])]
        started = Round(prompts, task, evaluation, tasks=tasks)
        self.slot.is_needed = bool(started.remaining)
        return started

    def _new_evaluation(self, version: int) -> Evaluation:
        sets = self.plan.eval_sets
        scored = self.eval_tasks.begin() if self.eval_tasks is not None else [None] * len(sets)
        return Evaluation(self.plan, self.mesh, self._folder, version, scored)

    @phase("rollout")
    def rollout(self, clock: Clock) -> None:
        self.generate(clock)
        with clock.part("rollout"):
            self.slot.sleep()
        self.end_generation(was_lost=self.slot.replace_lost(clock))

    def generate(self, clock: Clock) -> None:
        """Generate what is left of the round on this rank's engine, until the engine is lost."""
        assert self._round is not None
        engine = self.slot.engine
        if engine is not None and self.slot.is_active:
            with self.slot.noting_loss(), self._profiled(engine):
                for task in self._round.remaining:
                    with clock.part(task.clock_name):
                        task.run(engine)  # groups are scored as they finish

    def end_generation(self, *, was_lost: bool) -> None:
        """Find out whether the round is generated. A collective. `was_lost`: whether any engine was."""
        assert self._round is not None
        self.slot.is_needed = bool(self._round.remaining)
        self._round.is_generated = not (was_lost and sum_over_ranks(self.slot.is_needed))

    def _profiled(self, engine: RolloutEngine) -> AbstractContextManager[None]:
        if self._round is None or self._round.prompts is None:  # an evaluation on its own
            return nullcontext()
        root, step = self._folder.root, self._step
        return engine_profiled(self.plan.recipe.profile, root, step, engine, self.engine_number)

    def statistics(self) -> Statistics:
        numbers = {**self._numbers, **self.evaluation}
        counts = self.slot.metrics() | self.weight_sync.metrics()
        return as_statistics(numbers | counts) | self.slot.watch.metrics()

    def _local_task(self, prompts: StepPrompts) -> Task | None:
        """Return this engine's share of the prompts; None where this rank leads no engine."""
        if self.scoring is None:
            return None
        started, num_wanted = prompts.share(self.engine_number, self.plan.num_engines)
        return make_step_task(self.plan, self.scoring, started, num_wanted)

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

    def _backlog_groups(self) -> list[SampleGroup]:
        return self.exchange.collect(super()._backlog_groups())

    def close(self) -> None:
        try:
            self.slot.stop()
        finally:
            for each in (self.scoring, self.eval_tasks):
                if each is not None:
                    each.close()


def make_place(plan: Plan, mesh: Mesh, folder: RunFolder) -> tuple[EngineSlot, EngineGroup]:
    """Return this rank's place for an engine, not started, and the ranks that the engine spans. A
    collective."""
    recipe, tp = plan.recipe, plan.recipe.rollout.tensor_parallel_size
    group = EngineGroup.create(
        mesh.rank, dist.get_world_size(), tp, timeout_s=recipe.longest_wait_s
    )
    slot = EngineSlot(
        make_engine(plan, mesh.rank, mesh.device, folder, group.exchange),
        mesh.rank // tp,
        recipe.rollout.max_restarts,
        MemoryWatch(mesh.device, console.warning),
        keeps_weights=served_adapter(plan) is not None,
    )
    return slot, group
