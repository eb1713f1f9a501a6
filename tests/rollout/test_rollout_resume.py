"""A round that ends early, and what it left continued under newer weights; on a real engine."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from rollout_helpers import make_buckets, make_prompts, named_weights, score
from transformers import Qwen3MoeForCausalLM

from mrl.collect.backlog import Backlog, StepPrompts
from mrl.collect.single_turn import SingleTurnRollout, is_finished
from mrl.config import RolloutConfig
from mrl.engines.base import SamplingParams
from mrl.engines.sglang.engine import Engine
from mrl.types import SampleGroup, VersionSpan

# The toy model hardly ever stops by itself: with this it does about every 120 tokens. Some samples must
# have begun before two groups have ended, also where other processes delay their requests.
SAMPLING = SamplingParams(max_new_tokens=300, stop_token_ids=(0,))
CONFIG = RolloutConfig(
    max_response_len=300, prompts_per_step=2, samples_per_prompt=2, over_sampling=3,
    partial_rollouts="resume",
)  # fmt: skip


def rolled_out(
    engine: Engine, plan: StepPrompts, num_wanted: int
) -> tuple[list[SampleGroup], list[SampleGroup]]:
    groups, seeds = zip(*((one.group, one.seed) for one in plan.started), strict=True)
    rollout = SingleTurnRollout(groups, SAMPLING, seeds, num_wanted)
    done = list(rollout.finished(engine.endpoint))
    assert rollout.is_over
    return done, rollout.partial


@pytest.fixture(scope="module")
def moved(oracle, tmp_path_factory) -> tuple[Qwen3MoeForCausalLM, Path]:
    """The toy model after an update, and a folder for its weights."""
    model = copy.deepcopy(oracle)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            noise = torch.randn(weights.shape, generator=generator)
            weights.add_(0.1 * weights.std().nan_to_num(0.0) * noise)
    return model, tmp_path_factory.mktemp("moved")


@pytest.mark.timeout(200)
def test_samples_go_on_under_newer_weights(engine: Engine, oracle, moved) -> None:
    model, folder = moved
    queue = iter(make_prompts(12))
    backlog = Backlog(CONFIG)

    def draw(n: int):
        return [next(queue) for _ in range(n)]

    plan = backlog.begin_step(draw, seed=1)
    done, left = rolled_out(engine, plan, plan.num_wanted)
    assert (len(done), len(left)) == (2, 4)
    assert all(is_finished(group) for group in done)
    metrics = backlog.end_step(plan, done, left, 0)
    assert metrics["rollout/off_policy_tokens"] == 0.0
    saved = backlog.records([one.group for one in backlog.waiting])

    engine.endpoint.update_weights(make_buckets(named_weights(model, folder), 1), 1)
    backlog = Backlog(CONFIG)
    backlog.take_up(saved)
    before = {one.group.prompt.prompt_id: one.group.samples for one in backlog.waiting}
    plan = backlog.begin_step(draw, seed=2)
    done, left = rolled_out(engine, plan, len(plan.started))
    assert not left
    assert {group.prompt.prompt_id for group in done} >= before.keys()

    num_resumed = 0
    for group in done:
        for k, sample in enumerate(group.samples):
            start, end = sample.prompt_len, len(sample.token_ids)
            early = before.get(group.prompt.prompt_id, [])
            old_end = len(early[k].token_ids) if early else start
            if early and early[k].finish_reason != "abort":
                assert torch.equal(sample.token_ids, early[k].token_ids)
                assert sample.weight_versions == (VersionSpan(0, start, end),)
                continue
            num_resumed += start < old_end
            spans = [VersionSpan(0, start, old_end), VersionSpan(1, old_end, end)]
            assert list(sample.weight_versions) == [s for s in spans if s.end > s.start]
            assert sample.finish_reason in ("stop", "length")
            assert end - start <= SAMPLING.max_new_tokens
            if early:
                assert torch.equal(sample.token_ids[:old_end], early[k].token_ids)
            assert_each_segment_is_its_weights(sample, old_end, oracle, model)
    assert num_resumed >= 1
    metrics = backlog.end_step(plan, done, [], 1)
    assert metrics["rollout/resumed_samples"] == num_resumed
    assert 0 < metrics["rollout/off_policy_tokens"] < 1
    assert metrics["rollout/backlog_prompts"] == 0


def assert_each_segment_is_its_weights(sample, old_end: int, oracle, model) -> None:
    """Log-probs and routes equal transformers' under the weights that made each token."""
    start = sample.prompt_len
    (old, old_routes), (new, new_routes) = (
        score(m, sample.token_ids, start, 1.0) for m in (oracle, model)
    )
    got, split = sample.rollout_logprobs[start:], old_end - start
    torch.testing.assert_close(got[:split], old[:split], atol=1e-4, rtol=0)
    torch.testing.assert_close(got[split:], new[split:], atol=1e-4, rtol=0)
    assert float((old - new).abs().max()) > 0.05  # or the weights made no difference
    first_new = old_end - 1 if split else 0  # row t produced token t + 1
    ids = sample.routing.expert_ids.long().sort(-1).values
    expected = torch.cat([old_routes[:first_new], new_routes[first_new:]]).sort(-1).values
    assert torch.equal(ids, expected)
    versions = [VersionSpan(0, 0, first_new), VersionSpan(1, first_new, len(ids))]
    assert list(sample.routing.row_versions) == [s for s in versions if s.end > s.start]


@pytest.mark.release  # tests/collect/test_backlog.py has the seeds of deferred prompts
@pytest.mark.timeout(200)
def test_a_prompt_that_waits_for_its_turn_twice_is_started_with_its_own_seed(
    engine: Engine, toy_weights
) -> None:
    """Deferred: the same weights give the same answers again, however slow they were."""
    config = CONFIG.model_copy(update={"partial_rollouts": "defer", "over_sampling": 2.0})
    backlog, queue = Backlog(config), iter(make_prompts(9, seed=3))

    def draw(n: int):
        return [next(queue) for _ in range(n)]

    plan = backlog.begin_step(draw, seed=5)
    alone, _ = rolled_out(engine, backlog.begin_step(lambda n: make_prompts(n, seed=3), 5), 4)
    done, left = rolled_out(engine, plan, plan.num_wanted)
    backlog.end_step(plan, done, left, 0)
    plan = backlog.begin_step(draw, seed=6)
    assert plan.is_long_round
    late, _ = rolled_out(engine, plan, plan.num_wanted)
    found = {g.prompt.prompt_id: [s.token_ids.tolist() for s in g.samples] for g in done + late}
    assert found == {g.prompt.prompt_id: [s.token_ids.tolist() for s in g.samples] for g in alone}
