"""Where a step's scored groups come from: a live engine, or the rollouts that another run saved.

Both give every rank the same groups in the same order, so that everything after is the same on every
rank and independent of how many engines there were.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from mrl import console
from mrl.data import PromptCursor
from mrl.preflight import Plan
from mrl.rewards.runner import RewardRunner, check_failures
from mrl.rollout import load_engine
from mrl.rollout.base import CUDA_GRAPH, KV_CACHE, WEIGHTS, RolloutEngine, SamplingParams
from mrl.rollout.saved import decode_groups, encode_groups, load_groups, without_route_ids
from mrl.run_folder import RunFolder, saved_step
from mrl.types import SampleGroup
from parallel.groups import Groups
from parallel.policy import Policy


@dataclass
class Clock:
    """Wall-clock seconds of the parts of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Collector(Protocol):
    """Gives a step's scored groups; every method is called on all ranks."""

    start_text: str
    """What `start` does, for the terminal."""

    def start(self, policy: Policy) -> None:
        """Make ready; may take long. The policy is as it was afterwards."""
        ...

    def collect(self, step: int, policy: Policy, clock: Clock) -> list[SampleGroup]:
        """Groups in prompt order with rewards; times `sync`, `rollout` and `score`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: what a resumed run needs to go on with the next prompts."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """Leave no process behind. Safe to call twice, and after a failure."""
        ...


class EngineCollector:
    """Prompts -> engine -> rewards. The first rank of each engine group leads an engine."""

    start_text = "starting the rollout engine"

    def __init__(self, plan: Plan, groups: Groups, folder: RunFolder) -> None:
        recipe = plan.recipe
        self.plan, self.groups = plan, groups
        self.cursor = PromptCursor(plan.prompts, seed=recipe.seed, shuffle=recipe.data.shuffle)
        tp = recipe.rollout.tensor_parallel_size
        self.engine_number = groups.rank // tp
        self.engine: RolloutEngine | None = None
        self.rewards: RewardRunner | None = None
        if groups.rank % tp == 0:
            self.engine = load_engine(recipe.rollout.engine)(
                model=recipe.model,
                config=recipe.rollout,
                log_path=folder.logs / f"engine_{self.engine_number:02d}.log",
                return_routes=recipe.moe.routing_replay == "r3",
                gpu_ids=_gpu_ids(groups, tp),
                seed=recipe.seed,
            )
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
        with clock.part("sync"):
            self.sync(step, policy)
        with clock.part("rollout"):
            own = self._generate(step)
            dist.barrier()
        with clock.part("score"):
            failed = self._score(own)
            return self._share(own, failed)

    def sync(self, version: int, policy: Policy) -> None:
        """Bring the engine to the policy's weights and awake; the policy leaves the device."""
        policy.onload()  # a step that only rolled out left it on the host
        policy.offload_optimizer()
        dist.barrier()  # an engine wakes on the devices of several ranks
        buckets = policy.export(version, self.plan.recipe.rollout.weight_bucket_mb << 20)
        if self.engine is None:
            for _ in buckets:  # the gathers are collectives: follow them to the end
                pass
        else:
            self.engine.wake((WEIGHTS,))
            self.engine.update_weights(buckets, version)
        policy.offload_parameters()
        dist.barrier()
        if self.engine is not None:
            self.engine.wake((KV_CACHE, CUDA_GRAPH))

    def _generate(self, step: int) -> list[SampleGroup]:
        rollout = self.plan.recipe.rollout
        prompts = self.cursor.next(rollout.prompts_per_step)
        if self.engine is None:
            return []
        first, last = (
            number * len(prompts) // self.plan.num_engines
            for number in (self.engine_number, self.engine_number + 1)
        )
        own = self.engine.generate(
            prompts[first:last],
            first_group_id=first,
            samples_per_prompt=rollout.samples_per_prompt,
            sampling=SamplingParams(
                max_new_tokens=rollout.max_response_len,
                min_new_tokens=rollout.min_response_len,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
            ),
            seed=self.plan.recipe.seed * 1_000_003 + step,
        )
        self.engine.sleep()
        return own

    def _score(self, own: list[SampleGroup]) -> int:
        """Fill in the rewards of this engine's groups; returns how many samples failed."""
        if self.rewards is None or not own:
            return 0
        rollout = self.plan.recipe.rollout
        rewards = self.rewards.score(
            own,
            completions(own, self.plan.tokenizer),
            step_samples=rollout.prompts_per_step * rollout.samples_per_prompt,
        )
        report = self.rewards.report
        if report.num_failed or report.num_repeated:
            console.warning(
                f"the reward function failed on {report.num_repeated} groups, scored again one by "
                f"one; {report.num_failed} samples masked: {report.first_error}"
            )
        for group, values in zip(own, rewards, strict=True):
            group.rewards = values
        return self.rewards.report.num_failed

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
        check_failures(
            self.plan.recipe.reward,
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


class SavedCollector:
    """The groups of `debug.load_rollouts`, step by step; no engine and no reward function.

    Each rank keeps the routes of some groups, as if it had rolled them out.
    """

    start_text = "opening the saved rollouts"

    def __init__(self, folder: str, groups: Groups) -> None:
        self.folder, self.groups = folder, groups

    def start(self, policy: Policy) -> None:
        """Nothing to make ready."""

    def collect(self, step: int, policy: Policy, clock: Clock) -> list[SampleGroup]:
        with clock.part("sync"), clock.part("score"), clock.part("rollout"):
            everything = load_groups(saved_step(self.folder, step))
            rank, world = self.groups.rank, self.groups.dims.world
            return [
                group if i % world == rank else without_route_ids(group)
                for i, group in enumerate(everything)
            ]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The step number says it all."""

    def close(self) -> None:
        """Nothing is held."""


def make_collector(plan: Plan, groups: Groups, folder: RunFolder) -> Collector:
    saved = plan.recipe.debug.load_rollouts
    return SavedCollector(saved, groups) if saved else EngineCollector(plan, groups, folder)


def completions(groups: Sequence[SampleGroup], tokenizer: Any) -> list[list[str]]:
    """The text of every sample's response, without special tokens."""
    return [
        [
            tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True)
            for sample in g.samples
        ]
        for g in groups
    ]


def _gpu_ids(groups: Groups, tp: int) -> list[str]:
    """The GPUs of this engine group on its node, none on a CPU machine."""
    if groups.device.type != "cuda":
        return []
    assert groups.device.index is not None
    numbers = range(groups.device.index, groups.device.index + tp)
    # Ours count within what this process may see; the engine's process starts from the machine's.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [visible.split(",")[n] for n in numbers] if visible else [str(n) for n in numbers]
