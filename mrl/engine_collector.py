"""Prompts -> engine -> rewards: the source of a step's groups in a live run.

The first rank of each engine group leads an engine; all ranks take part in the weight syncs. An engine
that is lost in the middle of a step is replaced: what it had finished is kept, the other ranks wait,
all send the weights once more, and the rest is generated with the same seeds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import console
from mrl.canary import canary_sequences, check_canaries, default_tolerance
from mrl.collect import Clock
from mrl.completions import completions
from mrl.data import PromptCursor
from mrl.environments.runner import EnvironmentRunner
from mrl.episodes import Episodes
from mrl.errors import RunFailed
from mrl.preflight import Plan
from mrl.rewards.runner import RewardRunner, check_failures
from mrl.rollout import load_engine
from mrl.rollout.base import (
    CUDA_GRAPH,
    KV_CACHE,
    WEIGHTS,
    EngineLost,
    RolloutEngine,
    SamplingParams,
)
from mrl.rollout.saved import decode_groups, encode_groups
from mrl.rollout.scheduling import Round, start_groups
from mrl.run_folder import RunFolder
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
        self.rewards: RewardRunner | None = None
        self.environments: EnvironmentRunner | None = None
        self._scoring = ThreadPoolExecutor(1)
        self._lost: EngineLost | None = None
        self._canaries = canary_sequences(plan.prompts, recipe.rollout.canary_prompts)
        self._tolerance = recipe.rollout.canary_tolerance or default_tolerance(
            choose_dtype(recipe.model.dtype)
        )
        self._statistics: Statistics = {}
        if groups.rank % tp == 0:
            self.engine = load_engine(recipe.rollout.engine)(
                model=recipe.model,
                config=recipe.rollout,
                log_path=folder.logs / f"engine_{self.engine_number:02d}.log",
                return_routes=recipe.moe.routing_replay == "r3",
                gpu_ids=_gpu_ids(groups, tp),
                seed=recipe.seed,
            )
            if recipe.environment is not None:
                self.environments = EnvironmentRunner(recipe.environment)
            elif recipe.reward is not None:
                self.rewards = RewardRunner(recipe.reward, recipe.reward_timeout_s)

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
        prompts = self.cursor.next(self.plan.recipe.rollout.prompts_per_step)
        scored = self._generate_all(step, self._own_round(step, prompts), policy, clock)
        with clock.part("score"):
            return self._share(*self._wait_for_rewards(scored))

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
        expected = policy.score(self._canaries) if self._canaries else []
        dist.barrier()  # an engine wakes on the devices of several ranks
        buckets = policy.export(version, self.plan.recipe.rollout.weight_bucket_mb << 20)
        try:
            if engine is not None:
                with self._noting_loss():
                    engine.wake((WEIGHTS,))
                    engine.update_weights(buckets, version)
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
        return check_canaries(engine, self._canaries, expected, self._tolerance)

    def _own_round(self, step: int, prompts: Sequence[Any]) -> Round | Episodes | None:
        """This engine's share of the step's prompts."""
        if self.engine is None:
            return None
        rollout = self.plan.recipe.rollout
        first, last = (
            number * len(prompts) // self.plan.num_engines
            for number in (self.engine_number, self.engine_number + 1)
        )
        sampling = SamplingParams(
            max_new_tokens=rollout.max_response_len,
            min_new_tokens=rollout.min_response_len,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
        )
        seed = self.plan.recipe.seed * 1_000_003 + step
        if self.environments is not None:
            return Episodes(
                prompts[first:last],
                self.environments,
                self.plan.tokenizer,
                samples_per_prompt=rollout.samples_per_prompt,
                sampling=sampling,
                max_turns=self.environments.config.max_turns,
                context_len=self.plan.context_len,
                seed=seed,
                first_group_id=first,
                step_samples=self._step_samples,
            )
        groups = start_groups(prompts[first:last], rollout.samples_per_prompt, first)
        return Round(groups, sampling, seed)

    @property
    def _step_samples(self) -> int:
        rollout = self.plan.recipe.rollout
        return rollout.prompts_per_step * rollout.samples_per_prompt

    def _generate_all(
        self, step: int, own: Round | Episodes | None, policy: Policy, clock: Clock
    ) -> list[tuple[SampleGroup, Future[Tensor]]]:
        """Sync and generate until no engine has anything left; groups are scored as they finish."""
        if self.rewards is not None:
            self.rewards.begin_step()
        scored: list[tuple[SampleGroup, Future[Tensor]]] = []
        num_restarts, recovery_s, canary = 0, 0.0, 0.0
        while True:
            wanted = own is not None and bool(own.unfinished)
            with clock.part("sync"):
                canary = max(canary, self.sync(step, policy, wanted=wanted))
            with clock.part("rollout"):
                if wanted and own is not None and self.engine is not None and self._lost is None:
                    with self._noting_loss():
                        for group in own.finished(self.engine):
                            scored.append((group, self._start_scoring(group)))
                        self.engine.sleep()
                num_lost = _sum_over_ranks(self._lost is not None)
            if not num_lost:
                break
            num_restarts += num_lost
            recovery_s += self._replace_lost(num_restarts)
            if not _sum_over_ranks(own is not None and bool(own.unfinished)):
                break
        self._statistics = {
            "rollout/engine_restarts": Max(torch.tensor(float(num_restarts))),
            "rollout/canary_abs_mean": Max(torch.tensor(canary)),
            "time/recovery_s": Max(torch.tensor(recovery_s)),
        }
        return scored

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """A lost engine is no error yet: the ranks have to agree on what to do."""
        try:
            yield
        except EngineLost as error:
            self._lost = error

    def _replace_lost(self, num_restarts: int) -> float:
        """Start another engine where one was lost; returns the seconds. A collective."""
        start = time.perf_counter()
        limit = self.plan.recipe.rollout.max_restarts
        if num_restarts > limit:
            raise RunFailed(
                f"{num_restarts} rollout engines were lost in one step, more than "
                f"rollout.max_restarts={limit}; {self._lost or 'see the warnings of other ranks'}"
            )
        if self._lost is not None and self.engine is not None:
            console.warning(f"{self._lost}")
            console.warning(f"rollout engine {self.engine_number}: starting another one")
            self.engine.start()
            self.engine.sleep()
            self._lost = None
        dist.barrier()
        return time.perf_counter() - start

    def _start_scoring(self, group: SampleGroup) -> Future[Tensor]:
        if self.rewards is None:
            assert group.rewards is not None  # the environments'
            done: Future[Tensor] = Future()
            done.set_result(group.rewards)
            return done
        (texts,) = completions([group], self.plan.tokenizer)
        return self._scoring.submit(
            self.rewards.score_group,
            group,
            texts,
            step_samples=self._step_samples,
        )

    def _wait_for_rewards(
        self, scored: Sequence[tuple[SampleGroup, Future[Tensor]]]
    ) -> tuple[list[SampleGroup], int]:
        """This engine's groups with their rewards, and how many samples failed."""
        for group, rewards in scored:
            group.rewards = rewards.result()
        groups = sorted((g for g, _ in scored), key=lambda group: group.samples[0].group_id)
        return groups, self._report_failures()

    def _report_failures(self) -> int:
        """Warn of samples that are masked for a fault of what scores them, and count them."""
        if self.environments is not None:
            environments = self.environments
            if environments.num_failed:
                console.warning(
                    f"{environments.what} failed in {environments.num_failed} episodes, which are "
                    f"masked ({environments.num_replayed} others were played again): "
                    f"{environments.first_error}"
                )
            return environments.num_failed
        if self.rewards is None:
            return 0
        report = self.rewards.report
        if report.num_failed or report.num_repeated:
            console.warning(
                f"the reward function failed on {report.num_repeated} groups, scored again one by "
                f"one; {report.num_failed} samples masked: {report.first_error}"
            )
        return report.num_failed

    def _share(self, own: Sequence[SampleGroup], num_failed: int) -> list[SampleGroup]:
        """Everybody's groups on every rank; raises where too many rewards failed over all."""
        if self.groups.dims.world == 1:
            return list(own)
        parts: list[tuple[bytes, int]] = [(b"", 0)] * self.groups.dims.world
        dist.all_gather_object(parts, (encode_groups(own) if own else b"", num_failed))
        recipe = self.plan.recipe
        everything = [group for part, _ in parts if part for group in decode_groups(part)]
        check_failures(
            f"reward {recipe.reward!r}"
            if recipe.environment is None
            else f"environment {recipe.environment.name!r}",
            sum(failed for _, failed in parts),
            sum(len(group.samples) for group in everything),
        )
        return sorted(everything, key=lambda group: group.samples[0].group_id)

    def state_dict(self) -> dict[str, Any]:
        return self.cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor.load_state_dict(state)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.stop()
        if self.rewards is not None:
            self.rewards.close()
        if self.environments is not None:
            self.environments.close()
        self._scoring.shutdown(cancel_futures=True)


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
