"""Many agents at a time get the bits of the environment's episodes, with rollout.batch_invariant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rollout_helpers import make_buckets, make_engine
from test_endpoint import CHAT, bits, by_agents, by_environment, prompts_of, same_bits

from mrl.engines.base import RolloutEngine, SamplingParams
from mrl.toy_model import build_tokenizer

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def invariant(toy_folder: Path, toy_weights, tmp_path_factory) -> Iterator[RolloutEngine]:
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    engine = make_engine(toy_folder, log, batch_invariant=True)
    engine.start()
    engine.endpoint.update_weights(make_buckets(toy_weights, 0), 0)
    yield engine
    engine.stop()


@pytest.mark.parametrize("form", ["chat", "text", "openai", "stream"])
def test_many_at_a_time(invariant, form):
    prompts = prompts_of(build_tokenizer(), ["guess:" if form == "text" else CHAT] * 4)
    many = by_agents(invariant.endpoint, prompts, form, samples=4, num_agents=8, max_turns=3)
    expected = by_environment(invariant.endpoint, prompts, samples=4, max_turns=3)
    assert same_bits(many, expected)
    assert len({bits(sample) for group in many for sample in group.samples}) == 16


@pytest.mark.parametrize("form", ["chat", "text"])
def test_conversations_that_end_at_each_length_of_the_context(invariant, form):
    """From one token of room after the prompt to all three turns, as in the environment."""
    prompts = prompts_of(build_tokenizer(), ["guess:" if form == "text" else CHAT])
    exact = SamplingParams(5, 5)
    first = len(prompts[0].token_ids)
    (whole,) = by_environment(invariant.endpoint, prompts, samples=1, sampling=exact, max_turns=3)
    last = len(whole.samples[0].token_ids)
    ends = []
    for context_len in range(first + 1, last + 2):
        both = {"samples": 1, "sampling": exact, "context_len": context_len, "max_turns": 3}
        (agents,) = by_agents(invariant.endpoint, prompts, form, **both)
        (expected,) = by_environment(invariant.endpoint, prompts, **both)
        assert same_bits([agents], [expected]), context_len
        (sample,) = agents.samples
        ends.append(len(sample.token_ids))
        assert len(sample.token_ids) <= context_len
        whole_ids = whole.samples[0].token_ids
        assert torch.equal(sample.token_ids, whole_ids[: len(sample.token_ids)])
    assert ends[0] == first + 1
    assert ends[-1] == last
    assert len(set(ends)) > 10
