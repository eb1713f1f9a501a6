"""Prompts -> engine -> rewards: the source of a step's groups in a live run.

The first rank of each engine group leads an engine; all ranks take part in the weight syncs. An engine
that is lost in the middle of a step is replaced: what it had finished is kept, the other ranks wait,
all send the weights once more, and the rest is generated with the same seeds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.collect.backlog import Backlog, Started, StepPlan
from mrl.collect.base import SyncCount
from mrl.collect.canary import canary_sequences, check_canaries, default_tolerance
from mrl.collect.dynamic_sampling import SignalRounds
from mrl.collect.engine_nodes import make_engine
from mrl.collect.evaluation import Evaluation, Evaluator
from mrl.collect.scoring import Scoring
from mrl.collect.task import Task, make_task, share_scored, share_unfinished
from mrl.data import PromptCursor
from mrl.errors import RunFailed
from mrl.exchange.rollouts import RolloutExchange
from mrl.exchange.sharing import sum_over_ranks
from mrl.preflight import Plan
from mrl.rollout.base import (
    CUDA_GRAPH,
    KV_CACHE,
    WEIGHTS,
    EngineLost,
    RolloutEngine,
)
from mrl.rollout.engine_group import EngineGroup, GatheredBuckets
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.system.clock import Clock
from mrl.system.memory_watch import MemoryWatch
from mrl.types import Max, SampleGroup, Statistics
from parallel.implementation import choose_dtype
from parallel.mesh import Mesh
from parallel.policy import Policy


class EngineCollector:
    """See `mrl.collect.base.Collector`."""

    start_text = "starting the rollout engine"

    def __init__(self, plan: Plan, mesh: Mesh, folder: RunFolder) -> None:
        recipe = plan.recipe
        self.plan, self.mesh = plan, mesh
        self.cursor = PromptCursor(plan.prompts, seed=recipe.seed, shuffle=recipe.data.shuffle)
        tp = recipe.rollout.tensor_parallel_size
        self.engine_number = mesh.rank // tp
        self._engine_group = EngineGroup.create(
            mesh.rank, dist.get_world_size(), tp, timeout_s=recipe.longest_wait_s
        )
        self.scoring: Scoring | None = None
        self._lost: EngineLost | None = None
        self._canaries = canary_sequences(plan.prompts, recipe.rollout.canary_prompts)
        self._dtype = choose_dtype(recipe.rollout.engine_dtype(recipe.model))
        self._tolerance = recipe.rollout.canary_tolerance or default_tolerance(
            choose_dtype(recipe.model.dtype), self._dtype
        )
        self._count = SyncCount()
        self.watch = MemoryWatch(mesh.device, console.warning)
        self._statistics: Statistics = {}
        self.backlog = Backlog(recipe.rollout)
        self.exchange = RolloutExchange(mesh)
        """Moves groups that wait for another step to the engine that goes on with them."""
        self._nodes = make_engine(plan, mesh, folder, self._engine_group.exchange)
        self.engine = self._nodes.engine
        if self.engine is not None:
            self.scoring = Scoring(recipe, plan.tokenizer)
        self.evaluator = Evaluator(plan, mesh, folder, self.engine_number if self.engine else None)

    def start(self, policy: Policy) -> None:
        # The engine sizes its KV cache by the memory that it finds free now.
        policy.offload_optimizer()
        policy.offload_parameters()
        dist.barrier()
        self._nodes.start()
        if self.engine is not None:
            self.engine.sleep()
        dist.barrier()
        policy.onload()

    def collect(self, step: int, policy: Policy, clock: Clock) -> list[SampleGroup]:
        seed = self.plan.recipe.seed * 1_000_003 + step
        self._count = SyncCount()
        plan = self._with_tokens(self.backlog.begin_step(self.cursor.next, seed))
        evaluation = self._evaluation_due(step)
        also = evaluation.tasks if evaluation else []
        groups, partial = self._round(step, plan, policy, clock, also)
        numbers = self.backlog.end_step(plan, groups, partial, step)
        if evaluation is not None:
            with clock.part("eval"):
                numbers |= evaluation.finish()
        if self.plan.recipe.algorithm.dynamic_sampling:
            groups, more = self._rounds_after(groups, step, seed, policy, clock)
            numbers |= more
        self._statistics = as_statistics(numbers | self._count.metrics()) | self.watch.metrics()
        return groups

    def _round(
        self, step: int, plan: StepPlan, policy: Policy, clock: Clock, also: Sequence[Task] = ()
    ) -> tuple[list[SampleGroup], list[SampleGroup]]:
        """The scored groups of a plan, and those that it left unfinished, both on every rank."""
        own = self._own_task(plan)
        self._generate_all(step, [*([own] if own else []), *also], policy, clock)
        recipe = self.plan.recipe
        with clock.part("score"):
            groups = share_scored(own, recipe, self.mesh)
            resumes = recipe.rollout.partial_rollouts == "resume"
            return groups, share_unfinished(own, self.mesh) if resumes else []

    def _rounds_after(
        self, groups: list[SampleGroup], step: int, seed: int, policy: Policy, clock: Clock
    ) -> tuple[list[SampleGroup], dict[str, float]]:
        """The step's groups after dynamic sampling; each round sends the weights anew."""
        rounds = SignalRounds(self.plan.recipe.rollout)
        rounds.add(groups)
        while not rounds.is_over:
            plan = rounds.next_round(self.cursor.next, seed)
            rounds.add(self._round(step, plan, policy, clock)[0])
        if rounds.num_missing and self.mesh.rank == 0:
            console.warning(f"step {step}: {rounds.complaint()}")
        return rounds.result(), rounds.metrics()

    def evaluate(self, version: int, policy: Policy, clock: Clock) -> dict[str, float]:
        self._count = SyncCount()
        evaluation = self.evaluator.begin(version)
        self._generate_all(version, evaluation.tasks, policy, clock)
        with clock.part("eval"):
            return evaluation.finish()

    def _evaluation_due(self, step: int) -> Evaluation | None:
        every = self.plan.recipe.eval.every
        return self.evaluator.begin(step) if every and step % every == 0 else None

    def statistics(self) -> Statistics:
        return self._statistics

    def sync(self, version: int, policy: Policy, *, wanted: bool = True) -> float:
        """Bring the engine to the policy's weights and awake; the policy leaves the device.

        A collective; where not `wanted`, this rank's engine is left asleep. Returns the mean
        |difference| of the canaries' log-probs, 0 without.
        """
        engine = self.engine if wanted else None
        policy.onload()  # a step that only rolled out left it on the host
        policy.offload_optimizer()
        with self._verifying():
            expected = policy.sequence_logprobs(self._canaries) if self._canaries else []
        dist.barrier()  # an engine wakes on the devices of several ranks
        failure = self._send_weights(engine, version, policy)
        policy.offload_parameters()
        # Also the barrier before anybody's cache of keys and values takes the memory.
        if sum_over_ranks(failure is not None):
            raise failure or RunFailed("a weight sync failed on another rank; see its message")
        if engine is None or self._lost is not None:
            return 0.0
        with self._noting_loss():
            engine.wake((KV_CACHE, CUDA_GRAPH))
            return self._check_canaries(engine, expected)
        return 0.0

    def _send_weights(
        self, engine: RolloutEngine | None, version: int, policy: Policy
    ) -> Exception | None:
        """This rank's part of one export, and what this rank failed of. A lost engine is no failure."""
        rollout = self.plan.recipe.rollout
        bucket_bytes = rollout.weight_bucket_bytes(policy.export_bytes(self._dtype))
        buckets = GatheredBuckets(
            policy.export(version, bucket_bytes, self._dtype),
            self._engine_group.exchange,
            has_handles=rollout.tensor_parallel_size > 1 and rollout.weight_sync == "tensor",
        )
        failure = None
        try:
            if engine is not None:
                with self._noting_loss():
                    engine.wake((WEIGHTS,))
                    self._count.verify_s += engine.update_weights(buckets, version).digest_s
        except (RuntimeError, ValueError) as error:
            failure = error
        finally:
            try:
                buckets.finish()  # its gathers are collectives: every rank follows them to the end
            except (RuntimeError, ValueError) as error:
                failure = failure or error
        return failure

    def _check_canaries(self, engine: RolloutEngine, expected: Sequence[Tensor]) -> float:
        if not self._canaries:
            return 0.0
        with self._verifying():
            return check_canaries(engine, self._canaries, expected, self._tolerance)

    @contextmanager
    def _verifying(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._count.verify_s += time.perf_counter() - start

    def _own_task(self, plan: StepPlan) -> Task | None:
        """This engine's share of what the step starts."""
        if self.scoring is None:
            return None
        started, num_wanted = plan.share(self.engine_number, self.plan.num_engines)
        groups, seeds = [one.group for one in started], [one.seed for one in started]
        recipe = self.plan.recipe
        return make_task(
            self.plan, recipe, self.scoring, groups, seeds, num_wanted, clock_name="rollout"
        )

    def _with_tokens(self, plan: StepPlan) -> StepPlan:
        """The plan with the groups that go on whole on the engines that they go on with."""
        resumed, fresh = plan.started[: plan.num_resumed], plan.started[plan.num_resumed :]
        tp, num_engines = self.plan.recipe.rollout.tensor_parallel_size, self.plan.num_engines
        leaders = [(i % num_engines) * tp for i in range(len(resumed))]
        moved = self.exchange.move([one.group for one in resumed], leaders)
        whole = [Started(group, one.seed) for group, one in zip(moved, resumed, strict=True)]
        return dataclasses.replace(plan, started=[*whole, *fresh])

    def _generate_all(
        self, version: int, tasks: Sequence[Task], policy: Policy, clock: Clock
    ) -> None:
        """Sync and generate until no engine has anything left; groups are scored as they finish."""
        count = self._count
        while True:
            left = [task for task in tasks if not task.is_over]
            with clock.part("sync"):
                count.canary = max(count.canary, self.sync(version, policy, wanted=bool(left)))
            if left and self._lost is None:
                self._generate(left, clock)
            with clock.part("rollout"):  # the wait for the slowest engine is part of it
                num_lost = self._count_lost()
            if not num_lost:
                break
            start = time.perf_counter()
            while num_lost:  # the next one may be lost while it starts
                count.restarts += num_lost
                self._replace_lost(count.restarts)
                num_lost = self._count_lost()
            count.recovery_s += time.perf_counter() - start
            if not sum_over_ranks(any(not task.is_over for task in tasks)):
                break

    def _generate(self, tasks: Sequence[Task], clock: Clock) -> None:
        assert self.engine is not None
        with self._noting_loss():
            for task in tasks:
                with clock.part(task.clock_name):
                    task.run(self.engine)
            with clock.part("rollout"):
                self.watch.read("awake", self.engine.process_id)
                self.engine.sleep()
                self.watch.read("asleep", self.engine.process_id)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """A lost engine is no error yet: the ranks have to agree on what to do."""
        try:
            yield
        except EngineLost as error:
            self._lost = error

    def _count_lost(self) -> int:
        """Engines that were lost, over all ranks; every rank of a lost one knows that it was."""
        self._lost = self._nodes.share_loss(self._lost)
        return sum_over_ranks(self._lost is not None and self.engine is not None)

    def _replace_lost(self, num_restarts: int) -> None:
        """Start another engine where one was lost, the last of `num_restarts` over all ranks.

        Raises RunFailed, on every rank, where these are too many.
        """
        limit = self.plan.recipe.rollout.max_restarts
        if num_restarts > limit:
            raise RunFailed(
                f"{num_restarts} rollout engines were lost in one step, more than "
                f"rollout.max_restarts={limit}; {self._lost or 'see the messages of other ranks'}"
            )
        if self._lost is None:
            return
        if self.engine is not None:
            console.warning(f"{self._lost}")
            console.warning(f"rollout engine {self.engine_number}: starting another one")
        self._lost = None
        try:
            self._nodes.start()
            if self.engine is not None:
                self.engine.sleep()
        except RuntimeError as error:
            self._lost = error if isinstance(error, EngineLost) else EngineLost(str(error))

    def state_dict(self) -> dict[str, Any]:
        waiting = self.exchange.collect([one.group for one in self.backlog.waiting])
        backlog = self.backlog.state_dict(waiting) if self.mesh.rank == 0 else {}
        return {**self.cursor.state_dict(), "backlog": backlog}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor.load_state_dict(state)
        if "backlog" in state:  # not in a checkpoint from before there was one
            self.backlog.load_state_dict(state["backlog"])

    def close(self) -> None:
        try:
            self._nodes.stop()
        finally:
            if self.scoring is not None:
                self.scoring.close()
            self.evaluator.close()


def as_statistics(numbers: Mapping[str, float]) -> Statistics:
    """Numbers that are the same on every rank."""
    return {key: Max(torch.tensor(value, dtype=torch.float64)) for key, value in numbers.items()}
