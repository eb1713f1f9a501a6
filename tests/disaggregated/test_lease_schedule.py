"""Leases of a free-running run: what workers get, what a step takes, and what a resume keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from mrl.config import load_recipe
from mrl.engine_pool.remote.lease_schedule import LeaseSchedule, default_groups
from mrl.engine_pool.remote.messages import FinishedGroup, FinishedSample, LeasedGroup
from mrl.errors import WrongWeights
from mrl.types import Prompt, SampleGroup, VersionSpan
from tests.sample_groups import prompt, sample

ROOT = Path(__file__).parents[2]
BATCH = 4


class Run:
    """Leases with workers that do nothing by themselves."""

    def __init__(self, *more: str) -> None:
        keys = ("rollout.placement=disaggregated", "rollout.num_ranks=2", "async.max_staleness=1")
        sizes = (f"rollout.prompts_per_step={BATCH}", "rollout.samples_per_prompt=2")
        self.recipe = load_recipe(ROOT / "launch/recipes/toy_moe.yaml", [*keys, *sizes, *more])
        self.num_drawn = 0
        self._granted: list[tuple[int, str, SampleGroup, int]] = []
        self.leases = LeaseSchedule(self.recipe, self.draw)

    def draw(self, num: int) -> list[Prompt]:
        self.num_drawn += num
        return [prompt(i) for i in range(self.num_drawn - num, self.num_drawn)]

    @property
    def granted(self) -> list[tuple[int, str, SampleGroup, int]]:
        for engine, message, body in self.leases.take_messages():
            lease = LeasedGroup.of_frame(message, body)
            self._granted.append((engine, lease.lease_id, lease.group, lease.seed))
        return self._granted

    def forget(self) -> list[tuple[int, str, SampleGroup, int]]:
        """The leases that were granted so far, which `granted` then lacks."""
        granted, self._granted = self.granted, []
        return granted

    def join(self, *engines: int) -> Run:
        for engine in engines:
            self.leases.joined(engine)
        return self

    def finish(self, lease_id: str, group: SampleGroup, version: int, *rewards: float) -> None:
        item = group.samples[0].group_id
        made = dataclasses.replace(
            sample(4, group_id=item), weight_versions=(VersionSpan(version, 2, 6),)
        )
        scored = SampleGroup(group.prompt, [made, made], torch.tensor(rewards or (1.0, 0.0)))
        self.leases.finish(FinishedGroup(lease_id, scored, 0))

    def finish_all(self, version: int, *rewards: float) -> None:
        for _, lease_id, group, _ in self.forget():
            self.finish(lease_id, group, version, *rewards)


def test_workers_get_as_many_leases_as_the_bound_allows_in_turns() -> None:
    run = Run().join(0, 1)
    run.leases.ask(0, 0, 3)
    assert [engine for engine, *_ in run.granted] == [0] * 3
    run.leases.ask(1, 0, 100)
    assert len(run.granted) == run.num_drawn == 2 * BATCH  # those that steps 0 and 1 train on
    assert len({lease_id for _, lease_id, *_ in run.granted}) == 2 * BATCH
    assert len({seed for *_, seed in run.granted}) == 2 * BATCH
    assert all(len(group.samples) == 2 for _, _, group, _ in run.granted)


def test_a_step_takes_numbered_groups_within_the_bound() -> None:
    run = Run().join(0)
    run.leases.ask(0, 0, 100)
    run.finish_all(0)
    batch = run.leases.take(0)
    assert batch is not None
    groups, _ = batch.finish()
    assert [s.group_id for g in groups for s in g.samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [g.prompt.prompt_id for g in groups] == ["0", "1", "2", "3"]
    assert run.granted == []  # weights 0 are too old for step 2
    run.leases.ask(0, 1, 100)
    assert len(run.granted) == BATCH
    assert run.leases.take(1) is not None
    assert run.leases.take(2) is None
    run.finish_all(1)
    assert run.leases.take(2) is not None


def test_the_leases_of_a_lost_worker_go_to_another_and_its_late_answer_is_a_duplicate() -> None:
    run = Run().join(0, 1)
    run.leases.ask(0, 0, 2)
    lost = list(run.granted)
    run.forget()
    run.leases.ask(1, 0, 2)
    run.leases.lost(0)
    run.finish_all(0)
    assert {g.prompt.prompt_id for _, _, g, _ in run.granted} == {"0", "1"}
    for _, lease_id, group, _ in lost:
        run.finish(lease_id, group, 0)
    assert run.leases.ledger.metrics()["async/duplicates"] == 2
    run.finish_all(0)
    batch = run.leases.take(0)
    assert batch is not None
    assert [g.prompt.prompt_id for g in batch.finish()[0]] == ["0", "1", "2", "3"]


def test_a_wrong_stamp_is_refused() -> None:
    run = Run().join(0)
    run.leases.ask(0, 0, 1)
    (_, lease_id, group, _), *_ = run.granted
    run.leases.ledger.step = 2
    with pytest.raises(WrongWeights, match=r"engine 0 says that weights 7 .* can have had 0 alone"):
        run.finish(lease_id, group, 7)
    run.leases.sent(0, 1)
    with pytest.raises(WrongWeights, match="the stamps of its tokens are wrong"):
        run.finish(lease_id, group, 2)  # the trainer has it, but did not send it
    assert run.leases.ledger.finished == {}


def test_dynamic_sampling_replaces_groups_without_variance_and_ends() -> None:
    more = ("algorithm.dynamic_sampling=true", "rollout.dynamic_sampling_rounds=3")
    run = Run(*more).join(0)
    run.leases.ask(0, 0, BATCH)
    for _ in range(3):
        assert run.leases.take(0) is None
        run.finish_all(0, 1.0, 1.0)
    assert run.leases.ledger.metrics()["async/dropped/zero_variance"] == 2 * BATCH
    batch = run.leases.take(0)
    assert batch is not None
    assert [g.prompt.prompt_id for g in batch.finish()[0]] == ["8", "9", "10", "11"]


def test_a_resume_keeps_the_queue_and_gives_the_leased_prompts_again() -> None:
    run = Run().join(0)
    run.leases.ask(0, 0, 100)
    half = run.granted[: BATCH + 1]
    for _, lease_id, group, _ in half:
        run.finish(lease_id, group, 0, 0.25, 0.75)
    assert run.leases.take(0) is not None
    resumed = Run().join(0)
    resumed.num_drawn = run.num_drawn
    resumed.leases.resume(run.leases.waiting(), 1, run.leases.ledger.counts())
    resumed.join(0)
    resumed.leases.ask(0, 1, 100)
    again = {g.prompt.prompt_id for _, _, g, _ in resumed.granted}
    assert {"5", "6", "7"} <= again
    assert "4" not in again  # in the queue
    seeds = {g.prompt.prompt_id: seed for *_, g, seed in [*run.granted]}
    assert all(
        seed == seeds[g.prompt.prompt_id]
        for *_, g, seed in resumed.granted
        if g.prompt.prompt_id in seeds
    )
    resumed.finish_all(1)
    batch = resumed.leases.take(1)
    assert batch is not None
    first = batch.finish()[0][0]
    assert first.prompt.prompt_id == "4"
    assert first.rewards is not None
    assert first.rewards.tolist() == [0.25, 0.75]


def test_finished_samples_of_a_group_that_is_not_whole_outlive_its_worker_and_a_resume() -> None:
    run = Run().join(0, 1)
    run.leases.ask(0, 0, 1)
    (_, lease_id, group, _), *_ = run.granted
    done = dataclasses.replace(sample(4), weight_versions=(VersionSpan(0, 2, 6),))
    run.leases.report(FinishedSample(lease_id, SampleGroup(group.prompt, [done]), 1))
    assert run.leases.ledger.metrics()["async/kept_tokens"] == 0
    waiting, counts = run.leases.waiting(), run.leases.ledger.counts()
    run.forget()
    run.leases.lost(0)
    run.leases.ask(1, 0, 1)
    resumed = Run()
    resumed.leases.resume(waiting, 0, counts)
    resumed.join(0)
    resumed.leases.ask(0, 0, 1)
    for each in (run, resumed):
        ((_, other_id, again, _), *_) = each.granted
        assert other_id != lease_id
        assert [s.finish_reason for s in again.samples] == ["abort", "stop"]
        assert again.samples[1].token_ids.tolist() == done.token_ids.tolist()
        assert each.leases.ledger.metrics()["async/kept_tokens"] == done.num_generated
    alone = SampleGroup(group.prompt, [done])
    run.leases.report(FinishedSample(lease_id, alone, 0))  # the lease was taken away
    ((_, other_id, _, _), *_) = run.granted
    run.leases.report(FinishedSample(other_id, alone, 0))
    (partial,) = run.leases.ledger.partials.values()
    assert partial.num_tokens == 2 * done.num_generated


def test_samples_of_a_lost_worker_that_are_too_old_by_then_are_generated_anew() -> None:
    run = Run("async.at_bound=drop").join(0, 1)
    run.leases.ask(0, 0, 1)
    ((_, lease_id, group, _),) = run.granted
    run.forget()
    done = dataclasses.replace(sample(4), weight_versions=(VersionSpan(0, 2, 6),))
    run.leases.report(FinishedSample(lease_id, SampleGroup(group.prompt, [done]), 0))
    for step in range(2):  # others finish what steps 0 and 1 train on
        run.leases.sent(1, step)
        run.leases.ask(1, step, BATCH)
        run.finish_all(step)
        run.leases.ask(1, step, 0)
        assert run.leases.take(step) is not None
    run.forget()
    run.leases.lost(0)
    run.leases.ask(1, 2, 100)
    (_, _, again, _), *_ = run.granted
    assert again.prompt.prompt_id == group.prompt.prompt_id
    assert [s.finish_reason for s in again.samples] == ["abort", "abort"]
    assert run.leases.ledger.metrics()["async/kept_tokens"] == 0
    assert run.leases.ledger.metrics()["async/discarded_tokens"] == done.num_generated


def test_which_runs_are_free() -> None:
    assert Run().recipe.asynchronous.is_free
    assert not Run("async.deterministic=true").recipe.asynchronous.is_free
    assert default_groups(8, 4) == 4
    assert default_groups(1, 4) == 1
