"""What becomes of prompts that a step started and did not need: none is lost, none comes twice."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from rollout_helpers import make_prompts

from moe.trace import join_traces, joined_spans
from mrl.collect.backlog import (
    Backlog,
    Started,
    StepPrompts,
    left_over,
    older_tokens,
)
from mrl.collect.single_turn import is_finished
from mrl.config import AlgorithmConfig, RolloutConfig
from mrl.data.cursor import PromptCursor
from mrl.errors import InputError
from mrl.preflight.long_tails import check_partial_rollouts
from mrl.run.pending_prompts import PendingPrompt, pending_state, read_pending
from mrl.sampling_mask import SamplingMask
from mrl.types import RoutingTrace, Sample, SampleGroup, VersionSpan

NUM_PROMPTS = 23


def config_of(rng: random.Random, partial_rollouts: str) -> RolloutConfig:
    return RolloutConfig(
        max_response_len=1000,  # `grown` cuts nothing off
        prompts_per_step=rng.randint(1, 6),
        samples_per_prompt=rng.randint(1, 3),
        over_sampling=rng.uniform(1.05, 3.0),
        partial_rollouts=partial_rollouts,  # pyright: ignore[reportArgumentType]
    )


def grown(sample: Sample, version: int, num_new: int, reason: str) -> Sample:
    """The sample with `num_new` tokens of weights `version` more."""
    start, total = len(sample.token_ids), len(sample.token_ids) + num_new
    spans = (*sample.weight_versions, VersionSpan(version, start, total)) if num_new else ()
    return Sample(
        group_id=sample.group_id,
        token_ids=torch.cat([sample.token_ids, torch.full((num_new,), version)]),
        prompt_len=sample.prompt_len,
        loss_mask=torch.arange(total) >= sample.prompt_len,
        rollout_logprobs=torch.zeros(total),
        weight_versions=joined_spans(spans, ()) or sample.weight_versions,
        finish_reason=reason,
    )


def content(backlog: Backlog) -> list[tuple]:
    return [
        (
            one.seed,
            one.group.prompt.prompt_id,
            s.token_ids.tolist(),
            s.weight_versions,
            s.finish_reason,
        )
        for one in backlog.waiting
        for s in one.group.samples
    ]


def through_json(backlog: Backlog) -> list[PendingPrompt]:
    """What waits, as a checkpoint gives it back."""
    records = backlog.records([one.group for one in backlog.waiting])
    return read_pending(json.loads(json.dumps({"waiting": pending_state(records)})))


def rolled_out(
    plan: StepPrompts, version: int, num_engines: int, rng: random.Random
) -> tuple[list[SampleGroup], list[SampleGroup]]:
    """Groups that were whole first, and the rest: any that chance picks, as engines would give them."""
    trained: list[SampleGroup] = []
    partial: list[SampleGroup] = []
    for engine in range(num_engines):
        started, wanted = plan.share(engine, num_engines)
        order = rng.sample(started, len(started))
        for place, one in enumerate(order):
            enough = place >= wanted
            samples = [
                sample
                if sample.finish_reason != "abort"
                else grown(
                    sample,
                    version,
                    rng.randint(not enough, 3),
                    rng.choice(["abort", "stop"]) if enough else "stop",
                )
                for sample in one.group.samples
            ]
            (partial if enough else trained).append(SampleGroup(one.group.prompt, samples))
    return sorted(trained, key=lambda g: g.samples[0].group_id), partial


@pytest.mark.parametrize("partial_rollouts", ["drop", "resume", "defer"])
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_or_doubled_over_random_steps_and_restarts(partial_rollouts, seed) -> None:
    rng = random.Random(seed)
    config = config_of(rng, partial_rollouts)
    prompts = make_prompts(NUM_PROMPTS)
    cursor, backlog = PromptCursor(prompts, seed=seed), Backlog(config)
    drawn: Counter[str] = Counter()
    done: Counter[str] = Counter()

    def draw(n: int):
        batch = cursor.next(n)
        drawn.update(prompt.prompt_id for prompt in batch)
        return batch

    for step in range(40):
        plan = backlog.begin_step(draw, seed=step)
        trained, partial = rolled_out(plan, step, rng.randint(1, 3), rng)
        assert len(trained) == config.prompts_per_step  # the step gets what it needs, always
        assert all(is_finished(group) for group in trained)
        done.update(group.prompt.prompt_id for group in trained)
        metrics = backlog.end_step(plan, trained, partial, step)
        if partial_rollouts == "drop":
            done.update(g.prompt.prompt_id for g in partial)
            assert metrics == {"rollout/dropped_prompts": len(partial)}
        else:
            assert metrics["rollout/backlog_prompts"] == len(backlog.waiting)
        waiting = Counter(one.group.prompt.prompt_id for one in backlog.waiting)
        assert done + waiting == drawn
        if rng.random() < 0.3:  # killed and resumed
            before = content(backlog)
            records = through_json(backlog)
            backlog = Backlog(config)
            assert backlog.take_up(records) == []
            assert content(backlog) == before
    # The backlog stays small: what one step leaves, and for long rounds what gathers up to one.
    assert len(backlog.waiting) < config.num_started


def test_resumed_prompts_come_first_with_all_they_have() -> None:
    config = RolloutConfig(
        max_response_len=8, prompts_per_step=2, samples_per_prompt=2, over_sampling=2,
        partial_rollouts="resume",
    )  # fmt: skip
    cursor, backlog = PromptCursor(make_prompts(9), seed=0, shuffle=False), Backlog(config)
    plan = backlog.begin_step(cursor.next, seed=7)
    whole = [plan.started[i].group for i in (1, 2)]
    for group in whole:
        group.samples = [grown(s, 3, 4, "stop") for s in group.samples]
    partial = [plan.started[i].group for i in (0, 3)]
    for group in partial:
        group.samples = [
            grown(group.samples[0], 3, 2, "stop"),
            grown(group.samples[1], 3, 3, "abort"),
        ]
    backlog.end_step(plan, whole, partial, 3)
    again = backlog.begin_step(cursor.next, seed=8)
    assert [one.seed for one in again.started] == [7, 7, 8, 8]
    assert [one.group.prompt.prompt_id for one in again.started] == ["0-0", "0-3", "0-4", "0-5"]
    for place, one in enumerate(again.started):
        assert [s.group_id for s in one.group.samples] == [place, place]
    kept = again.started[1].group.samples
    assert [len(s.response_ids) for s in kept] == [2, 3]
    assert [s.finish_reason for s in kept] == ["stop", "abort"]
    # Two of three weigh as older: 2 + 3 tokens of version 3 beside 4 new ones of version 4.
    kept[1] = grown(kept[1], 4, 4, "stop")
    metrics = older_tokens([again.started[1].group], 4)
    assert metrics == {
        "rollout/resumed_samples": 1.0,
        "rollout/off_policy_tokens": pytest.approx(5 / 9),
    }


def test_deferred_prompts_meet_in_one_long_round_with_their_own_seeds() -> None:
    config = RolloutConfig(
        max_response_len=8, prompts_per_step=4, samples_per_prompt=1, over_sampling=1.5,
        partial_rollouts="defer",
    )  # fmt: skip
    cursor, backlog = PromptCursor(make_prompts(20), seed=0, shuffle=False), Backlog(config)
    rounds = []
    for step in range(4):
        plan = backlog.begin_step(cursor.next, seed=100 + step)
        trained = [one.group for one in plan.started[: plan.num_wanted]]
        metrics = backlog.end_step(plan, trained, [], step)
        rounds.append((len(plan.started), metrics["rollout/deferred_prompts"], plan.is_long_round))
        if plan.is_long_round:
            assert [one.seed for one in plan.started] == [100, 100, 101, 101]
            assert all(len(s.response_ids) == 0 for one in plan.started for s in one.group.samples)
    assert rounds == [(6, 2, False), (6, 2, False), (4, 0, True), (6, 2, False)]


def test_without_over_sampling_all_is_as_ever() -> None:
    config = RolloutConfig(max_response_len=8, prompts_per_step=4, samples_per_prompt=2)
    cursor, backlog = PromptCursor(make_prompts(9), seed=0), Backlog(config)
    plan = backlog.begin_step(cursor.next, seed=1)
    assert (len(plan.started), plan.num_wanted) == (4, 4)
    assert backlog.end_step(plan, [one.group for one in plan.started], [], 0) == {}
    assert backlog.waiting == []


def test_a_group_that_an_engine_lost_is_noticed() -> None:
    started = [Started(SampleGroup(p, [grown_empty(i)]), 0) for i, p in enumerate(make_prompts(3))]
    plan = StepPrompts(started, 1, False, [])
    groups = [one.group for one in started]
    with pytest.raises(ValueError, match=r"got \[1\], expected \[1, 2\]"):
        left_over(plan, groups[:1], groups[1:2], "resume")


def grown_empty(group_id: int) -> Sample:
    nothing = torch.zeros(2)
    return Sample(group_id, torch.arange(2), 2, nothing > 0, nothing, (), "abort")


def test_routes_join_where_the_new_weights_took_over() -> None:
    def trace(num_rows: int, first: int, *spans: tuple[int, int, int], **more: int) -> RoutingTrace:
        ids = torch.arange(num_rows * 2).reshape(num_rows, 1, 2) + first
        rows = tuple(VersionSpan(*span) for span in spans)
        return RoutingTrace(ids.to(torch.uint8), (1,), 256, rows, **{"num_cached_rows": 1, **more})

    old = trace(5, 0, (3, 0, 5))  # P + C = 6 tokens
    new = trace(9, 100, (4, 0, 9), num_cached_rows=5)
    joined = join_traces(old, new)
    assert joined.row_versions == (VersionSpan(3, 0, 5), VersionSpan(4, 5, 9))
    assert torch.equal(joined.expert_ids, torch.cat([old.expert_ids, new.expert_ids[5:]]))
    assert joined.num_cached_rows == 1
    assert joined.num_recomputed_rows == 0
    again = join_traces(joined, trace(11, 7, (5, 0, 11), num_recomputed_rows=11))
    assert [span.version for span in again.row_versions] == [3, 4, 5]
    assert again.num_recomputed_rows == 11
    same = join_traces(old, trace(7, 0, (3, 0, 7)))
    assert same.row_versions == (VersionSpan(3, 0, 7),)


def test_engines_that_over_sample_nothing_are_refused() -> None:
    rollout = RolloutConfig(max_response_len=8, prompts_per_step=8, over_sampling=1.5)
    recipe = SimpleNamespace(rollout=rollout, environment=None, algorithm=AlgorithmConfig())
    check_partial_rollouts(recipe, 4)
    with pytest.raises(
        InputError, match=r"12 prompts for 8, engine 4 of 8 starts 1 and waits for all"
    ):
        check_partial_rollouts(recipe, 8)


def test_a_prompt_drawn_twice_is_not_the_same_samples_twice() -> None:
    config = RolloutConfig(max_response_len=8, prompts_per_step=3)
    first, second = make_prompts(2)
    started = Backlog(config).begin_step(lambda n: [first, second, first][:n], 7).started
    assert len({(one.group.prompt.prompt_id, one.seed) for one in started}) == 3


@pytest.mark.parametrize(("had", "wants"), [(True, True), (True, False), (False, True)])
def test_a_resumed_run_continues_only_log_probs_of_its_own_distribution(
    had: bool, wants: bool
) -> None:
    """Prompts start anew where `rollout.sampling_mask` is another than they began with."""
    config = RolloutConfig(
        max_response_len=8, prompts_per_step=1, samples_per_prompt=1, over_sampling=2,
        partial_rollouts="resume", top_k=4, sampling_mask=had,
    )  # fmt: skip
    backlog = Backlog(config)
    plan = backlog.begin_step(make_prompts, seed=0)
    sets = [[]] * plan.started[1].group.samples[0].prompt_len + [[0, 5]] * 3
    left = grown(plan.started[1].group.samples[0], 0, 3, "abort")
    if had:
        left = dataclasses.replace(left, sampling_mask=SamplingMask.of(sets))
    partial = [SampleGroup(plan.started[1].group.prompt, [left])]
    backlog.end_step(plan, [plan.started[0].group], partial, 0)
    other = Backlog(config.model_copy(update={"sampling_mask": wants}))
    other.take_up(through_json(backlog))
    (waiting,) = other.waiting
    (sample,) = waiting.group.samples
    assert sample.num_generated == (3 if had == wants else 0)
    assert (sample.sampling_mask is not None) == (had and wants)
