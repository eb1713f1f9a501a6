"""Real agents at the real endpoint, and how a rollout ends; the engine has no model."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from mrl.collect.endpoint.agents import Agents
from mrl.collect.endpoint.rollout import AgentRollout, GroupAgents
from mrl.collect.single_turn import start_groups
from mrl.config import EnvironmentConfig
from mrl.engines.base import EngineLost
from mrl.errors import RunFailed
from tests.endpoint.speaking import (
    SAMPLING,
    Speaking,
    make_prompt,
    tokenizer,
)

AGENT = Path(__file__).with_name("agent.py")


@pytest.fixture
def engine():
    return Speaking(tokenizer())


def roll_out(
    engine,
    kinds,
    *,
    num_agents=4,
    limit_s=60.0,
    max_turns=3,
    endpoints=(),
    on_group=lambda: None,
    **more,
):
    """Episodes of tests/endpoint/agent.py, one of each kind, two samples -> their groups and agents."""
    command = ("python", str(AGENT))
    config = EnvironmentConfig(
        command=command, num_agents=num_agents, episode_limit_s=limit_s, max_turns=max_turns
    )
    prompts = [make_prompt(engine.tokenizer, kind=kind, turns=2) for kind in kinds]
    with Agents(config, engine.tokenizer, {}) as agents:
        rollout = AgentRollout(
            start_groups(prompts, 2),
            GroupAgents(agents),
            sampling=SAMPLING,
            context_len=500,
            seeds=[1] * len(kinds),
            step_samples=1000,
            **more,
        )
        groups = []
        for endpoint in (*endpoints, engine):
            try:
                for group in rollout.finished(endpoint):
                    groups.append(group)
                    on_group()
            except EngineLost:
                assert not rollout.is_over
        assert rollout.is_over
        assert rollout.partial == []
        return {group.prompt.columns["kind"]: group for group in groups}, agents


def test_episodes_advance_on_their_own(engine):
    """Two turns of a good agent while another is at its first; groups come as they are complete."""
    waiting, one_is_complete = threading.Event(), threading.Event()

    def say(request):
        if "group 0" in request.request_id:
            waiting.set()
            assert one_is_complete.wait(60)
        else:
            assert waiting.wait(60)
        return "hello"

    engine.say = say
    groups, agents = roll_out(engine, ["good", "honest"], on_group=one_is_complete.set)
    assert list(groups) == ["honest", "good"]
    for group in groups.values():
        assert group.rewards.tolist() == [5.0, 5.0]
        for sample in group.samples:
            assert sample.num_generated == 12
            assert sample.finish_reason == "stop"
    assert agents.num_failed == agents.num_cut_off == 0


def test_agents_that_misbehave_are_masked(engine):
    kinds = ["good", "dies", "dies later", "lies", "silent", "hangs"]
    kinds += ["too many turns", "too long", "too long at first"]
    groups, agents = roll_out(engine, kinds, num_agents=16, limit_s=12.0, max_turns=12)
    for kind, group in groups.items():
        assert group.rewards.isnan().tolist() == [kind != "good"] * 2, kind
        reasons = {sample.finish_reason for sample in group.samples}
        assert reasons == {"stop" if kind == "good" else "abort"}
    assert groups["dies later"].samples[0].num_generated == 6
    assert groups["dies"].samples[0].num_generated == 0
    assert agents.num_failed == 10
    assert agents.num_cut_off == 6


def test_branches_become_samples_of_one_episode(engine):
    groups, _ = roll_out(engine, ["forgets", "good"], is_tree=True)
    assert groups["forgets"].episodes == (0, 0, 1, 1)
    assert groups["forgets"].rewards.tolist() == [5.0] * 4
    assert [s.num_generated for s in groups["forgets"].samples] == [6] * 4
    assert groups["good"].episodes == (0, 1)
    groups, agents = roll_out(engine, ["forgets", "good"])
    assert [agents.take_branched(), agents.take_branched()] == [2, 0]
    assert groups["forgets"].episodes is None
    assert len(groups["forgets"].samples) == 2


def test_too_many_failures_end_the_run_and_its_agents(engine):
    config = EnvironmentConfig(command=("python", str(AGENT)))
    prompts = [make_prompt(engine.tokenizer, kind=kind) for kind in ("hangs", "dies")]
    with Agents(config, engine.tokenizer, {}) as agents:
        rollout = AgentRollout(
            start_groups(prompts, 1), GroupAgents(agents), sampling=SAMPLING, context_len=500,
            seeds=[1, 1], step_samples=2,
        )  # fmt: skip
        with pytest.raises(
            RunFailed, match=r"environment command .* failed on 1 of 2 .*on purpose"
        ):
            list(rollout.finished(engine))


class Dying(Speaking):
    """Is lost at its third request, and answers nothing after that."""

    def generate(self, requests, **options):
        yield from super().generate(requests, **options)
        if len(self.asked) >= 3:
            raise EngineLost("on purpose")


def test_a_lost_engine_is_replaced_below_running_agents(engine):
    expected, _ = roll_out(engine, ["good", "honest"])
    first = Dying(engine.tokenizer)
    groups, agents = roll_out(engine, ["good", "honest"], endpoints=[first])
    assert agents.num_failed == 0
    for kind, group in groups.items():
        for sample, other in zip(group.samples, expected[kind].samples, strict=True):
            assert torch.equal(sample.token_ids, other.token_ids)
            assert torch.equal(sample.rollout_logprobs, other.rollout_logprobs)


def test_no_request_is_open_when_the_rollout_is_over(engine):
    """The engine is put to sleep then. The agent is killed while the engine answers it."""
    open_calls, ended = [], threading.Event()
    abort = engine.abort

    def say(request):
        open_calls.append(request)
        assert ended.wait(60)
        time.sleep(0.3)
        open_calls.remove(request)
        return "late"

    def note(ids=None):
        abort(ids)
        ended.set()

    engine.say, engine.abort = say, note
    groups, _ = roll_out(engine, ["good"], limit_s=2.0)
    assert not open_calls
    assert len(set(engine.aborted)) == 2
    assert groups["good"].rewards.isnan().all()


def test_an_error_of_the_engine_ends_the_rollout(engine):
    def say(request):
        raise RuntimeError("broken on purpose")

    engine.say = say
    with pytest.raises(RuntimeError, match="broken on purpose"):
        roll_out(engine, ["good"])


@pytest.mark.release
def test_a_thousand_episodes(engine):
    """None is lost; a hundred run at a time, each with a slow turn."""

    def say(request):
        time.sleep(0.05)
        return "hello"

    engine.say = say
    kinds = ["good"] * 500
    config = EnvironmentConfig(command=("python", str(AGENT)), num_agents=100)
    prompts = [make_prompt(engine.tokenizer, kind=kind, turns=2) for kind in kinds]
    with Agents(config, engine.tokenizer, {}) as agents:
        rollout = AgentRollout(
            start_groups(prompts, 2), GroupAgents(agents), sampling=SAMPLING, context_len=500,
            seeds=[1] * 500, step_samples=1000,
        )  # fmt: skip
        groups = list(rollout.finished(engine))
    assert len(groups) == 500
    assert all(group.rewards.tolist() == [5.0, 5.0] for group in groups)
    assert agents.num_failed == 0
    ids = [request.request_id for request in engine.asked]
    assert len(ids) == len(set(ids)) == 2000
    assert json.dumps(ids[0])
