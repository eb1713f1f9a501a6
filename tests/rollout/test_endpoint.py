"""Agents with a real SGLang server, beside the same episodes of an environment in this process.

Episodes of agents come one at a time here, so that each request is alone in its batch, as bits of a
CPU are those of a batch. tests/rollout/test_endpoint_bits.py has many at a time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from rollout_helpers import make_buckets

from mrl.collect.endpoint.agents import Agents
from mrl.collect.endpoint.rollout import AgentRollout, GroupAgents
from mrl.collect.multi_turn import GroupEnvironments, MultiTurnRollout
from mrl.collect.single_turn import start_groups
from mrl.config import EnvironmentConfig
from mrl.data.chat import ChatTurns
from mrl.engines.base import SamplingParams
from mrl.environments.runner import EnvironmentRunner
from mrl.toy_model import build_tokenizer
from mrl.types import Prompt, Sample, SampleGroup
from tests.release import release

AGENT = Path(__file__).parents[1] / "endpoint/guesses.py"
GUESS = {"turns": 3, "letters": "abcdefgh", "repeats": 4}


def prompts_of(tokenizer, contents) -> list[Prompt]:
    turns = ChatTurns(tokenizer)
    found = []
    for number, content in enumerate(contents):
        is_text = isinstance(content, str)
        ids = turns.encode(content) if is_text else turns.beginning(content, None)
        found.append(Prompt(str(number), torch.tensor(ids), content, {}, f"rows:{number}"))
    return found


def by_environment(endpoint, prompts, *, samples=2, **settings) -> list[SampleGroup]:
    config = EnvironmentConfig(name="guess_letter", arguments=GUESS)
    with EnvironmentRunner(config) as environments:
        rollout = MultiTurnRollout(
            start_groups(prompts, samples),
            GroupEnvironments(environments),
            build_tokenizer(),
            **of_both(settings, prompts),
        )
        return ordered(rollout.finished(endpoint))


def by_agents(
    endpoint, prompts, form="chat", *, samples=2, num_agents=1, **settings
) -> list[SampleGroup]:
    command = ("python", str(AGENT), form)
    limits = {"num_agents": num_agents, "episode_limit_s": 300, "max_turns": settings["max_turns"]}
    config = EnvironmentConfig(command=command, **limits)
    both = of_both(settings, prompts)
    both.pop("max_turns")
    with Agents(config, build_tokenizer(), {}) as agents:
        rollout = AgentRollout(start_groups(prompts, samples), GroupAgents(agents), **both)
        groups = ordered(rollout.finished(endpoint))
    assert (agents.num_failed, agents.first_error) == (0, "")
    return groups


def of_both(settings, prompts):
    return {
        "sampling": SamplingParams(8), "context_len": 500, "seeds": [7] * len(prompts),
        "step_samples": 1000, **settings,
    }  # fmt: skip


def ordered(groups) -> list[SampleGroup]:
    return sorted(groups, key=lambda group: group.samples[0].group_id)


def bits(sample: Sample) -> tuple:
    trace = sample.routing
    return (
        sample.token_ids.numpy().tobytes(),
        sample.loss_mask.numpy().tobytes(),
        sample.rollout_logprobs.numpy().tobytes(),
        trace.expert_ids.numpy().tobytes(),
        sample.prompt_len,
        sample.weight_versions,
        sample.finish_reason,
    )


def same_bits(one: list[SampleGroup], other: list[SampleGroup]) -> bool:
    for a, b in zip(one, other, strict=True):
        assert a.rewards.tolist() == pytest.approx(b.rewards.tolist(), abs=1e-6)
        for left, right in zip(a.samples, b.samples, strict=True):
            if bits(left) != bits(right):
                return False
    return True


CHAT = [{"role": "user", "content": "guess"}]


@pytest.mark.parametrize("form", ["chat", release("text")])
def test_an_agent_gets_the_bits_of_the_environment(engine, toy_weights, form):
    """One episode: tokens, log-probs and routes of three turns."""
    prompts = prompts_of(build_tokenizer(), [CHAT if form == "chat" else "guess:"])
    agents = by_agents(engine.endpoint, prompts, form, samples=1, max_turns=3)
    engine.endpoint.update_weights(make_buckets(toy_weights, 0), 0)
    environment = by_environment(engine.endpoint, prompts, samples=1, max_turns=3)
    assert same_bits(agents, environment)
    (sample,) = agents[0].samples
    assert len(sample.weight_versions) == 3
    assert len(sample.routing.expert_ids) == len(sample.token_ids) - 1


if __name__ == "__main__":  # by hand: what the agent printed
    print(json.dumps({"agent": str(AGENT), "python": sys.executable, "folder": os.getcwd()}))
