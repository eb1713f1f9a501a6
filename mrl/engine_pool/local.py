"""The pool of engines on the trainer's own devices: rollout and training take turns.

The first of an engine's ranks leads the engine, and all ranks take part in weight syncs. If an
engine is lost in the middle of a step, the samples that it has finished are kept and another engine
is started. Then all ranks sync the weights once more, and the remaining samples are generated with
the same seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import torch.distributed as dist

from mrl.collect.backlog import Started, StepPrompts
from mrl.collect.collector import Collector, as_statistics
from mrl.collect.prompts import PromptSupply, SynchronousSteps
from mrl.collect.task import EngineTasks, Task
from mrl.engine_pool.engine_nodes import make_engine, served_adapter
from mrl.engine_pool.local_engine import LocalEngine, engine_profiled
from mrl.engine_pool.part import EnginePart
from mrl.exchange.rollouts import RolloutExchange
from mrl.exchange.sharing import failing_together, sum_over_ranks
from mrl.preflight import Plan
from mrl.rewards.budget import Budget
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.system.clock import Clock
from mrl.system.heartbeat import phase
from mrl.system.memory_watch import MemoryWatch
from mrl.system.worker_user import WorkerUser
from mrl.types import SampleGroup, Statistics
from mrl.weight_sync.engine_group import EngineGroup
from parallel.mesh import Mesh
from parallel.policy import Policy


@dataclass
class LocalTasks:
    """The tasks that one call of `assign` or `assign_evaluation` gave to this rank's engine.
    Implements `mrl.collect.base.Assignment`."""

    scored: list[Task | None]
    """One task for the prompts of a step, or one task for each evaluation set. All are None if this
    rank leads no engine."""
    is_evaluation: bool = False

    @property
    def remaining(self) -> list[Task]:
        """The tasks in `scored` that have something left to generate."""
        return [task for task in self.scored if task is not None and not task.is_over]


class LocalPool:
    """The engines on the trainer's devices, for one policy. See `mrl.collect.base.Pool`.

    In a run without a service, `sync` and `rollout` are called. In a service, tenants share the
    engine, and neither is called: the service wakes the engine once for all tenants, and for each
    tenant calls `generate`, `end_generation` and the methods of `part` (an `EnginePart`).
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        folder: RunFolder,
        part: EnginePart,
        *,
        is_shared: bool = False,
        user: WorkerUser | None = None,
    ) -> None:
        """`part` syncs the policy's weights to the engine. `is_shared`: whether the engine belongs
        to a service, which starts and stops it. `user`: the owner of the processes of rewards and
        environments; None means the user of this process."""
        recipe = plan.recipe
        self.start_text = (
            "joining the service's engine" if is_shared else "starting the rollout engine"
        )
        self.part = part
        self.budget = Budget()
        """Limits the time of rewards and environments in a step. Outside a service there is no
        limit."""
        self.tasks: EngineTasks | None = None
        """Makes the tasks of this rank's engine; None if this rank leads no engine."""
        self._plan, self._mesh, self._root = plan, mesh, folder.root
        self._is_shared = is_shared
        self._number = mesh.rank // recipe.rollout.tensor_parallel_size
        self._exchange = RolloutExchange(mesh)
        """Moves partial groups to the rank whose engine continues them, and collects groups on rank
        0."""
        with ExitStack() as undo:
            undo.callback(self.close)
            with failing_together():
                if part.endpoint is not None:
                    self.tasks = EngineTasks(plan, self.budget, user)
            undo.pop_all()

    @phase("start")
    def start(self, policy: Policy) -> None:
        if self._is_shared:
            return  # the service's engine runs already
        # The engine sizes its KV cache by the memory that it finds free now.
        policy.offload_optimizer()
        policy.offload_parameters()
        dist.barrier()
        self.part.engine.start()
        dist.barrier()
        policy.onload()

    def begin_step(self) -> None:
        self.budget.begin_step()
        if not self._is_shared:
            self.part.engine.begin_step()
        self.part.metrics.reset()
        self._set_needed(is_needed=False)

    def assign(self, prompts: StepPrompts, version: int) -> LocalTasks:
        prompts = self._with_tokens(prompts)
        task = None
        if self.tasks is not None:
            started, num_wanted = prompts.share(self._number, self._plan.num_engines)
            task = self.tasks.of_step(started, num_wanted)
        return self._with_need(LocalTasks([task]))

    def _with_need(self, assigned: LocalTasks) -> LocalTasks:
        if assigned.remaining:
            self._set_needed(is_needed=True)
        return assigned

    def _set_needed(self, *, is_needed: bool) -> None:
        self.part.is_needed = is_needed
        if not self._is_shared:
            self.part.engine.is_needed = is_needed

    def _with_tokens(self, prompts: StepPrompts) -> StepPrompts:
        """Return the prompts, after moving the tokens and routes of each resumed group to the rank
        whose engine continues the group."""
        if not (num := prompts.num_resumed):
            return prompts
        resumed, fresh = prompts.started[:num], prompts.started[num:]
        tp, num_engines = self._plan.recipe.rollout.tensor_parallel_size, self._plan.num_engines
        leaders = [(i % num_engines) * tp for i in range(len(resumed))]
        moved = self._exchange.move([one.group for one in resumed], leaders)
        whole = [Started(group, one.seed) for group, one in zip(moved, resumed, strict=True)]
        return dataclasses.replace(prompts, started=[*whole, *fresh])

    def assign_evaluation(self, version: int) -> LocalTasks:
        if self.tasks is None:
            return LocalTasks([None] * len(self._plan.eval_sets), is_evaluation=True)
        return self._with_need(
            LocalTasks(
                [*self.tasks.of_evaluation(self._number, self._plan.num_engines)],
                is_evaluation=True,
            )
        )

    @phase("sync")
    def sync(self, policy: Policy, version: int) -> None:
        """Offload the policy to the host, wake the engine, and load the policy's weights into it.

        The engine then has the weights `version`. An engine that is lost or has nothing to generate
        stays asleep.
        """
        part, engine = self.part, self.part.engine
        policy.onload()  # a step that only rolled out left it on the host
        policy.offload_optimizer()
        part.prepare_sync(policy)
        dist.barrier()  # an engine wakes on the devices of several ranks
        part.send(policy, version, engine.wake_weights)
        policy.offload_parameters()
        part.raise_failures()  # also the barrier before any engine's KV cache takes the memory
        engine.wake_cache()
        part.check_sync()

    def rollout(self, assignments: Sequence[LocalTasks], step: int, clock: Clock) -> bool:
        self.generate(assignments, step, clock)
        with clock.part("rollout"):
            self.part.engine.sleep()
        return self.end_generation(assignments, self.part.engine.replace_lost(clock))

    def generate(self, assignments: Sequence[LocalTasks], step: int, clock: Clock) -> None:
        """Run the remaining tasks of this rank's engine; return early if the engine is lost. Not a
        collective."""
        if (endpoint := self.part.active_endpoint) is None:
            return
        engine, profiled = self.part.engine, nullcontext()
        if engine.server is not None and not all(each.is_evaluation for each in assignments):
            config = self._plan.recipe.profile
            profiled = engine_profiled(config, self._root, step, engine.server, self._number)
        with engine.noting_loss(), profiled:
            for task in remaining(assignments):
                with clock.part(task.clock_name):
                    task.run(endpoint)  # groups are scored as they finish

    def end_generation(self, assignments: Sequence[LocalTasks], was_lost: bool) -> bool:
        """Return whether all engines have generated all of their tasks. A collective.

        `was_lost`: whether any engine was lost since the last sync.
        """
        self._set_needed(is_needed=bool(remaining(assignments)))
        return not (was_lost and sum_over_ranks(self.part.is_needed))

    def gather(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        return self._exchange.collect(list(groups))

    def statistics(self, groups: Sequence[SampleGroup], step: int) -> Statistics:
        engine = self.part.engine
        measured = dataclasses.replace(
            self.part.metrics,
            num_restarts=engine.metrics.num_restarts,
            recovery_s=engine.metrics.recovery_s,
        )
        return as_statistics(measured.as_dict()) | engine.watch.metrics()

    def engine_spans(self) -> list[list[tuple[float, float, str]]]:
        return []

    def close(self) -> None:
        try:
            self.part.release()
        finally:
            if self.tasks is not None:
                self.tasks.close()


def remaining(assignments: Sequence[LocalTasks]) -> list[Task]:
    """Return the tasks of these assignments for which this rank's engine still has something to
    generate."""
    return [task for each in assignments for task in each.remaining]


def make_local_collector(plan: Plan, mesh: Mesh, folder: RunFolder) -> Collector:
    """Return the collector of a run whose engines are on the trainer's devices. A collective."""
    recipe, tp = plan.recipe, plan.recipe.rollout.tensor_parallel_size
    group = EngineGroup.create(
        mesh.rank, dist.get_world_size(), tp, timeout_s=recipe.longest_wait_s
    )
    sends_adapter = served_adapter(plan) is not None
    nodes = make_engine(plan, mesh.rank, mesh.device, folder, group.exchange)
    engine = LocalEngine(
        nodes,
        mesh.rank // tp,
        recipe.rollout.max_restarts,
        MemoryWatch(mesh.device, console.warning),
        keeps_weights=sends_adapter,
    )
    part = EnginePart(
        engine,
        nodes.endpoint,
        group,
        recipe.rollout,
        recipe.model,
        plan.prompts,
        sends_adapter=sends_adapter,
        release=engine.stop,
    )
    return collector_on(LocalPool(plan, mesh, folder, part), plan, mesh, folder)


def collector_on(pool: LocalPool, plan: Plan, mesh: Mesh, folder: RunFolder) -> Collector:
    """Return the collector of one policy. It draws the prompts of a step when the step begins."""
    supply = PromptSupply(plan)
    return Collector(plan, mesh, folder, supply, pool, SynchronousSteps(supply, pool, mesh))
