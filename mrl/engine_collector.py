"""Prompts -> engine -> rewards: the source of a step's groups in a live run.

The first rank of each engine group leads an engine; all ranks take part in the weight syncs. An engine
that is lost in the middle of a step is replaced: what it had finished is kept, the other ranks wait,
all send the weights once more, and the rest is generated with the same seeds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import console
from mrl.canary import canary_sequences, check_canaries, default_tolerance
from mrl.collect import Clock
from mrl.data import PromptCursor
from mrl.episodes import Episodes
from mrl.errors import RunFailed
from mrl.memory_watch import MemoryWatch
from mrl.preflight import Plan
from mrl.rewards.runner import check_failures
from mrl.rollout import load_engine
from mrl.rollout.backlog import Backlog, StepPlan
from mrl.rollout.base import (
    CUDA_GRAPH,
    KV_CACHE,
    WEIGHTS,
    EngineLost,
    RolloutEngine,
    SamplingParams,
)
from mrl.rollout.saved import decode_groups, encode_groups
from mrl.rollout.scheduling import Round
from mrl.run_folder import RunFolder
from mrl.scoring import Scoring
from mrl.types import Max, SampleGroup, Statistics
from parallel.groups import Groups
from parallel.implementation import choose_dtype
from parallel.policy import Policy


class EngineCollector:
    """See `mrl.collect.Collector`."""

    start_text = "starting the rollout engine"

    def __init__(self, plan: Plan, groups: Groups, folder: RunFolder) -> None:
        recipe = plan.recipe
        self.plan, self.groups = plan, groups
        self.cursor = PromptCursor(plan.prompts, seed=recipe.seed, shuffle=recipe.data.shuffle)
        tp = recipe.rollout.tensor_parallel_size
        self.engine_number = groups.rank // tp
        self.engine: RolloutEngine | None = None
        self.scoring: Scoring | None = None
        self._lost: EngineLost | None = None
        self._canaries = canary_sequences(plan.prompts, recipe.rollout.canary_prompts)
        self._dtype = choose_dtype(recipe.rollout.engine_dtype(recipe.model))
        self._tolerance = recipe.rollout.canary_tolerance or default_tolerance(
            choose_dtype(recipe.model.dtype), self._dtype
        )
        self.verify_s = 0.0
        """What digests and canaries of the step took, within `time/sync_s`."""
        self.watch = MemoryWatch(groups.device, console.warning)
        self._statistics: Statistics = {}
        self.backlog = Backlog(recipe.rollout)
        if groups.rank % tp == 0:
            self.engine = load_engine(recipe.rollout.engine)(
                model=recipe.model,
                config=recipe.rollout,
                log_path=folder.logs / f"engine_{self.engine_number:02d}.log",
                return_routes=recipe.moe.routing_replay == "r3",
                gpu_ids=_gpu_ids(groups, tp),
                seed=recipe.seed,
            )
            self.scoring = Scoring(recipe, plan.tokenizer)

    def start(self, policy: Policy) -> None:
        # The engine sizes its KV cache by the memory that it finds free now.
        policy.offload_optimizer()
        policy.offload_parameters()
        dist.barrier()
        if self.engine is not None:
            self.engine.start()
            self.engine.sleep()
        dist.barrier()
        policy.onload()

    def collect(self, step: int, policy: Policy, clock: Clock) -> list[SampleGroup]:
        plan = self.backlog.begin_step(self.cursor.next, self.plan.recipe.seed * 1_000_003 + step)
        own = self._own_work(plan)
        self._generate_all(step, own, policy, clock)
        with clock.part("score"):
            groups = self._share(*(self.scoring.finish() if self.scoring else ([], 0)))
            partial = self._share_unfinished(own)
        self._statistics |= self.watch.metrics()
        numbers = self.backlog.end_step(plan, groups, partial, step)
        self._statistics |= {key: Max(torch.tensor(value)) for key, value in numbers.items()}
        return groups

    def statistics(self) -> Statistics:
        return self._statistics

    def sync(self, version: int, policy: Policy, *, wanted: bool = True) -> float:
        """Bring the engine to the policy's weights and awake; the policy leaves the device.

        A collective; where not `wanted`, this rank's engine is left asleep. Returns the mean
        |difference| of the canaries' log-probs, 0 without. `verify_s` grows by what proof costs.
        """
        engine = self.engine if wanted else None
        policy.onload()  # a step that only rolled out left it on the host
        policy.offload_optimizer()
        with self._verifying():
            expected = policy.score(self._canaries) if self._canaries else []
        dist.barrier()  # an engine wakes on the devices of several ranks
        max_bytes = self.plan.recipe.rollout.weight_bucket_mb << 20
        buckets = policy.export(version, max_bytes, self._dtype)
        try:
            if engine is not None:
                with self._noting_loss():
                    engine.wake((WEIGHTS,))
                    self.verify_s += engine.update_weights(buckets, version).digest_s
        finally:
            for _ in buckets:  # the gathers are collectives: follow them to the end
                pass
        policy.offload_parameters()
        dist.barrier()
        if engine is None or self._lost is not None:
            return 0.0
        with self._noting_loss():
            engine.wake((KV_CACHE, CUDA_GRAPH))
            return self._check_canaries(engine, expected)
        return 0.0

    def _check_canaries(self, engine: RolloutEngine, expected: Sequence[Tensor]) -> float:
        if not self._canaries:
            return 0.0
        with self._verifying():
            return check_canaries(engine, self._canaries, expected, self._tolerance)

    @contextmanager
    def _verifying(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.verify_s += time.perf_counter() - start

    def _own_work(self, plan: StepPlan) -> Round | Episodes | None:
        """This engine's share of what the step starts."""
        if self.scoring is None:
            return None
        rollout = self.plan.recipe.rollout
        started, num_wanted = plan.share(self.engine_number, self.plan.num_engines)
        sampling = SamplingParams(
            max_new_tokens=rollout.max_response_len,
            min_new_tokens=rollout.min_response_len,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
        )
        groups, seeds = [one.group for one in started], [one.seed for one in started]
        environments = self.scoring.environments
        if environments is None:
            return Round(groups, sampling, seeds, num_wanted)
        return Episodes(
            groups,
            environments,
            self.plan.tokenizer,
            sampling=sampling,
            max_turns=environments.config.max_turns,
            context_len=self.plan.context_len,
            seeds=seeds,
            step_samples=rollout.prompts_per_step * rollout.samples_per_prompt,
        )

    def _generate_all(
        self, step: int, own: Round | Episodes | None, policy: Policy, clock: Clock
    ) -> None:
        """Sync and generate until no engine has anything left; groups are scored as they finish."""
        if self.scoring is not None:
            self.scoring.begin_step()
        num_restarts, recovery_s, canary, self.verify_s = 0, 0.0, 0.0, 0.0
        while True:
            wanted = own is not None and not own.is_over
            with clock.part("sync"):
                canary = max(canary, self.sync(step, policy, wanted=wanted))
            with clock.part("rollout"):
                if wanted and self._lost is None:
                    self._generate(own)
                num_lost = _sum_over_ranks(self._lost is not None)
            if not num_lost:
                break
            start = time.perf_counter()
            while num_lost:  # the next one may be lost while it starts
                num_restarts += num_lost
                self._replace_lost(num_restarts)
                num_lost = _sum_over_ranks(self._lost is not None)
            recovery_s += time.perf_counter() - start
            if not _sum_over_ranks(own is not None and not own.is_over):
                break
        self._statistics = {
            "rollout/engine_restarts": Max(torch.tensor(float(num_restarts))),
            "rollout/canary_abs_mean": Max(torch.tensor(canary)),
            "time/recovery_s": Max(torch.tensor(recovery_s)),
            "time/verify_s": Max(torch.tensor(self.verify_s)),
        }

    def _generate(self, own: Round | Episodes | None) -> None:
        assert own is not None
        assert self.engine is not None
        assert self.scoring is not None
        with self._noting_loss():
            for group in own.finished(self.engine):
                self.scoring.begin(group)
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
        if self._lost is None or self.engine is None:
            return
        console.warning(f"{self._lost}")
        console.warning(f"rollout engine {self.engine_number}: starting another one")
        self._lost = None
        try:
            self.engine.start()
            self.engine.sleep()
        except RuntimeError as error:
            self._lost = error if isinstance(error, EngineLost) else EngineLost(str(error))

    def _share(self, own: Sequence[SampleGroup], num_failed: int) -> list[SampleGroup]:
        """Everybody's groups on every rank, the ids of their routes where they were rolled out only;
        raises where too many rewards failed over all."""
        if self.groups.dims.world == 1:
            return list(own)
        parts: list[tuple[bytes, int]] = [(b"", 0)] * self.groups.dims.world
        mine = encode_groups(own, with_routes=False) if own else b""
        dist.all_gather_object(parts, (mine, num_failed))
        everything = list(own)
        for rank, (part, _) in enumerate(parts):
            if part and rank != self.groups.rank:
                everything += decode_groups(part)
        recipe = self.plan.recipe
        check_failures(
            f"reward {recipe.reward!r}"
            if recipe.environment is None
            else f"environment {recipe.environment.name!r}",
            sum(failed for _, failed in parts),
            sum(len(group.samples) for group in everything),
        )
        return sorted(everything, key=lambda group: group.samples[0].group_id)

    def _share_unfinished(self, own: Round | Episodes | None) -> list[SampleGroup]:
        """On every rank what all engines left, where it is resumed; nothing otherwise."""
        if self.plan.recipe.rollout.unfinished != "resume":
            return []
        left = own.unfinished if isinstance(own, Round) else []
        if self.groups.dims.world == 1:
            return left
        parts = [b""] * self.groups.dims.world
        dist.all_gather_object(parts, encode_groups(left) if left else b"")
        return [group for part in parts if part for group in decode_groups(part)]

    def state_dict(self) -> dict[str, Any]:
        return {**self.cursor.state_dict(), "backlog": self.backlog.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor.load_state_dict(state)
        if "backlog" in state:  # not in a checkpoint from before there was one
            self.backlog.load_state_dict(state["backlog"])

    def close(self) -> None:
        try:
            if self.engine is not None:
                self.engine.stop()
        finally:
            if self.scoring is not None:
                self.scoring.close()


def _sum_over_ranks(number: int | bool) -> int:
    total = torch.tensor(int(number))
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return int(total)


def _gpu_ids(groups: Groups, tp: int) -> list[str]:
    """The GPUs of this engine group on its node, none on a CPU machine."""
    if groups.device.type != "cuda":
        return []
    assert groups.device.index is not None
    numbers = range(groups.device.index, groups.device.index + tp)
    # Ours count within what this process may see; the engine's process starts from the machine's.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [visible.split(",")[n] for n in numbers] if visible else [str(n) for n in numbers]
