"""A run that is resumed with other keys, for tests of the prompts that wait in its checkpoints.

The collectors are the real ones; engines, sockets and weights are not there: what would come from them
is made up on the spot.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from mrl.algorithms import load_algorithm
from mrl.collect.backlog import StepPrompts
from mrl.collect.collector import Collector
from mrl.collect.prompts import PromptSupply, SynchronousSteps
from mrl.collect.single_turn import start_groups
from mrl.config import Recipe, load_recipe
from mrl.data.reader import Source
from mrl.engine_pool.remote.lease_schedule import LeaseSchedule
from mrl.engine_pool.remote.messages import (
    Delivered,
    FinishedGroup,
    FinishedSample,
    LeasedGroup,
    Work,
)
from mrl.engine_pool.remote.steps import make_remote_collector
from mrl.run.pending_prompts import PARTIAL, read_pending
from mrl.run.rollouts import encode_groups
from mrl.system.clock import Clock
from mrl.types import SampleGroup, VersionSpan
from tests.sample_groups import prompt, sample

ROOT = Path(__file__).parents[2]
PROMPTS = [prompt(i) for i in range(300)]
NEXT = 4
"""The tokens that a sample grows by."""


def grown(group: SampleGroup, version: int, places: Sequence[int] = ()) -> SampleGroup:
    """The group with its samples, or those at `places`, whole by tokens of `version`."""
    samples = []
    for place, old in enumerate(group.samples):
        if old.finish_reason != PARTIAL or (places and place not in places):
            samples.append(old)
            continue
        whole = sample(NEXT, group_id=old.group_id)
        spans = (VersionSpan(version, 2, 2 + NEXT),)
        samples.append(dataclasses.replace(whole, weight_versions=spans))
    return SampleGroup(group.prompt, samples)


def scored(group: SampleGroup) -> SampleGroup:
    return dataclasses.replace(group, rewards=torch.arange(float(len(group.samples))))


class _Server:
    """Delivers works by a fixed schedule as soon as they are assigned."""

    def __init__(self) -> None:
        self._results: dict[int, dict[int, Delivered]] = {}

    def new_id(self) -> int:
        return len(self._results)

    def assign_parts(self, make: Callable[[int, int, int, int], Work | None]) -> list[int]:
        ids = []
        for engine in range(2):
            if (work := make(self.new_id(), engine, engine, 2)) is not None:
                groups = [scored(grown(one.group, work.version)) for one in work.started]
                self._results[work.work_id] = {0: Delivered(groups[: work.num_wanted], 1)}
                ids.append(work.work_id)
        return ids

    def put(self, delivered: Delivered) -> int:
        self._results[number := self.new_id()] = {0: delivered}
        return number

    def peek(self, work_id: int) -> dict[int, Delivered]:
        return self._results[work_id]

    take = peek

    def wait_for(self, work_ids: Sequence[int], version: int) -> bool:
        return True

    def wait_until_free(self, version: int) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


class _Leases(_Server):
    """Two engines that ran freely: each lease is done at a random time, by weights of that time."""

    def __init__(self, recipe: Recipe, collector: Collector, rng: random.Random) -> None:
        super().__init__()
        self.leases = LeaseSchedule(recipe, collector.supply.draw)
        self._held: list[LeasedGroup] = []
        self._rng = rng
        for engine in range(2):
            self.leases.joined(engine)

    @contextmanager
    def paused(self) -> Iterator[LeaseSchedule]:
        yield self.leases

    def wait_until(self, take: Callable[[LeaseSchedule], Delivered | None], step: int) -> Delivered:
        for engine in range(2):
            self.leases.sent(engine, step)
            self.leases.ask(engine, step, 6)
        while (batch := take(self.leases)) is None:
            self._take_messages()
            held = self._held.pop(self._rng.randrange(len(self._held)))
            lease = self.leases.ledger.leases.get(held.lease_id)
            assert lease is not None
            whole = scored(grown(held.group, lease.version))
            self.leases.finish(FinishedGroup(held.lease_id, whole, 1))
        self._take_messages()
        for held in self._held[:2]:  # their first samples are whole, the rest is not
            group = held.group
            if group.samples[0].finish_reason == PARTIAL and len(group.samples) > 1:
                version = cast(Any, self.leases.ledger.leases.get(held.lease_id)).version
                alone = SampleGroup(group.prompt, grown(group, version, [0]).samples[:1])
                self.leases.report(FinishedSample(held.lease_id, alone, 0))
        return batch

    def _take_messages(self) -> None:
        for _, message, body in self.leases.take_messages():
            self._held.append(LeasedGroup.of_frame(message, body))


class _LocalPool:
    """Engines on the trainer's devices, of which the test plays the part."""

    start_text = ""

    def begin_step(self) -> None:
        pass

    def assign(self, prompts: StepPrompts, version: int) -> Any:
        return SimpleNamespace(scored=[None])

    def gather(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        return list(groups)


@functools.cache
def recipe_of(keys: tuple[str, ...]) -> Recipe:
    return load_recipe(ROOT / "launch/recipes/toy_moe.yaml", [*BASE, *keys])


def num_dropped(collector: Collector) -> int:
    coordinator = getattr(collector.pool, "coordinator", None)
    if not isinstance(coordinator, _Leases):
        return 0
    return sum(coordinator.leases.ledger.tally.dropped.values())


class Run:
    """A run that is resumed with other keys again and again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.step = 0
        self.trained: list[str] = []
        self.num_dropped = 0
        """Groups that were too old when they were done, under `async.at_bound: drop`."""
        self.state: dict[str, Any] | None = None

    def go_on(self, num_steps: int, keys: Sequence[str]) -> None:
        recipe = recipe_of(tuple(keys))
        collector = self._collector(recipe)
        if self.state is not None:
            collector.load_state_dict(json.loads(json.dumps(self.state)), self.step)
        before = num_dropped(collector)
        for _ in range(num_steps):
            self._step(collector, recipe)
            self.step += 1
        self.num_dropped += num_dropped(collector) - before
        self.state = collector.state_dict()
        self.collector = collector

    def _collector(self, recipe: Recipe) -> Collector:
        plan = SimpleNamespace(
            recipe=recipe, sources=[Source("a", PROMPTS, None, ())], prompts=PROMPTS, num_engines=2,
            eval_sets=[], algorithm=load_algorithm(recipe.algorithm.name),
        )  # fmt: skip
        mesh = SimpleNamespace(rank=0, dims=SimpleNamespace(world=1))
        given: Any = (plan, mesh, None)
        if recipe.rollout.placement == "colocated":
            supply, pool = PromptSupply(cast(Any, plan)), cast(Any, _LocalPool())
            steps = SynchronousSteps(supply, pool, cast(Any, mesh))
            return Collector(*given, supply, pool, steps)
        rendezvous = cast(Any, SimpleNamespace(is_shared=False, membership=None))
        collector = make_remote_collector(*given, rendezvous)
        pool = cast(Any, collector.pool)
        if recipe.asynchronous.is_free:
            pool.coordinator = _Leases(recipe, collector, self.rng)
        else:
            pool.coordinator = _Server()
        return collector

    def _step(self, collector: Collector, recipe: Recipe) -> None:
        clock = Clock()
        collector.begin(self.step, clock)
        if isinstance(collector.pool, _LocalPool):
            self._generate(collector)
        else:
            cast(Any, collector).rollout(clock)
        collector.score(clock)
        assert collector.is_over
        assert len(collector.groups) == recipe.rollout.prompts_per_step
        own_bound = recipe.asynchronous.max_staleness
        resumes = recipe.rollout.partial_rollouts == "resume"
        for number, group in enumerate(collector.groups):
            assert {s.group_id for s in group.samples} == {number} or resumes or own_bound == 0
            assert len(group.samples) == recipe.rollout.samples_per_prompt
            versions = {span.version for s in group.samples for span in s.weight_versions}
            assert max(versions) <= self.step
            assert resumes or self.step - min(versions) <= own_bound, "beyond the bound"
            self.trained.append(group.prompt.prompt_id)

    def _generate(self, collector: Collector) -> None:
        """Finish as many groups as are wanted, and let the others have one sample."""
        round_ = collector.round
        assert round_ is not None
        assert round_.prompts is not None
        started = self.rng.sample(round_.prompts.started, len(round_.prompts.started))
        wanted = round_.prompts.num_wanted
        groups = [scored(grown(one.group, self.step)) for one in started[:wanted]]
        left = [grown(one.group, self.step, [0]) for one in started[wanted:]]
        round_.batch = cast(Any, SimpleNamespace(scored=[Delivered(groups, 0, left)]))
        round_.is_generated = True

    def check(self) -> None:
        assert self.state is not None
        assert len(set(self.trained)) == len(self.trained), "trained on twice"
        drawn = {one.prompt_id for one in PROMPTS[: self.state["offset"]]}
        fresh = type(self)(0)
        fresh.state, fresh.step = self.state, self.step
        fresh.go_on(0, FIXED_0)
        again = [one.prompt_id for one in fresh.collector.supply.first]
        assert len(set(again)) == len(again)
        assert set(again).isdisjoint(self.trained)
        assert {*self.trained, *again} <= drawn
        assert len(drawn) - len(self.trained) - len(again) == self.num_dropped, "lost"


BASE = (
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "train.num_steps=100"),
    *("algorithm.importance=tis", "rollout.canary_prompts=0", "data.shuffle=false"),
)
APART = ("rollout.placement=disaggregated", "rollout.num_ranks=2")
FIXED_0 = (*APART, "async.max_staleness=0")
AHEAD = (*APART, "async.deterministic=true")
OVER = ("rollout.over_sampling=1.5",)
KINDS = {
    "colocated": (),
    "colocated resume": (*OVER, "rollout.partial_rollouts=resume"),
    "colocated defer": (*OVER, "rollout.partial_rollouts=defer"),
    "fixed 0": FIXED_0,
    "fixed 1": (*AHEAD, "async.max_staleness=1"),
    "fixed 3": (*AHEAD, "async.max_staleness=3"),
    "fixed 3, smaller steps": (*AHEAD, "async.max_staleness=3", "rollout.prompts_per_step=3"),
    "free 1": (*APART, "async.max_staleness=1"),
    "free 3": (*APART, "async.max_staleness=3"),
    "free 2, drop": (*APART, "async.max_staleness=2", "async.at_bound=drop"),
    "free 3, larger steps": (*APART, "async.max_staleness=3", "rollout.prompts_per_step=6"),
    "free 2, more samples": (*APART, "async.max_staleness=2", "rollout.samples_per_prompt=3"),
}


def old_state(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    """The state as each kind of collector wrote it once."""
    found = state["waiting"]
    groups = [one.group for one in read_pending(state)]
    state = {key: value for key, value in state.items() if key not in ("waiting", "ledger")}
    if kind.startswith("colocated"):
        return {**state, "backlog": {"seeds": found["seeds"], "groups": found["groups"]}}

    def text(some: Sequence[SampleGroup]) -> str:
        return base64.b64encode(encode_groups(some)).decode() if some else ""

    if kind.startswith("fixed"):
        ahead = {
            str(5 + i): {"groups": text(groups[4 * i : 4 * i + 4]), "num_failed": 1}
            for i in range(len(groups) // 4)
        }
        return {**state, "ahead": ahead, "backlog": {"seeds": [], "groups": ""}}
    items = found["items"]
    queue = [(i, g) for i, g in zip(items, groups, strict=True) if g.rewards is not None]
    rest = [(i, g) for i, g in zip(items, groups, strict=True) if g.rewards is None]
    begun = [(i, g) for i, g in rest if any(s.num_generated for s in g.samples)]
    fresh = [start_groups([g.prompt], 2)[0] for g in groups]
    leases = {
        "ledger": {
            "step": 5, "tally": _TALLY, "next_item": max(items) + 1, "next_lease": 99,
            "waiting": [i for i, _ in rest],
            "finished": [{"id": i, "oldest": 0, "newest": 0, "num_tokens": 1} for i, _ in queue],
        },
        "prompt_ids": items, "prompts": text(fresh),
        "queue_ids": [i for i, _ in queue], "queue": text([g for _, g in queue]),
        "num_failed": [0] * len(queue),
        "partial_ids": [i for i, _ in begun], "partials": text([g for _, g in begun]),
        "partial_oldest": [0] * len(begun), "partial_tokens": [1] * len(begun),
    }  # fmt: skip
    return {**state, "leases": leases, "backlog": {}}


_TALLY = {
    "trained": 20, "dropped": {"empty": 1}, "duplicates": 2, "discarded_tokens": 3,
    "kept_tokens": 4,
}  # fmt: skip
