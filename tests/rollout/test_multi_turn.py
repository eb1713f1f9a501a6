"""Conversations with a real SGLang server and real environments; transformers is the oracle."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rollout_helpers import score, slow_steps
from transformers import AutoTokenizer

from mrl.collect.multi_turn import GroupEnvironments, MultiTurnRollout
from mrl.collect.single_turn import start_groups
from mrl.config import EnvironmentConfig
from mrl.data.chat import ChatTurns
from mrl.engines.base import EngineLost, SamplingParams
from mrl.environments.runner import EnvironmentRunner
from mrl.learn.rollout_metrics import episode_metrics
from mrl.types import Prompt, VersionSpan

ZOO = Path(__file__).parents[1] / "environments/zoo.py"


@pytest.fixture(scope="module")
def tokenizer(toy_folder):
    return AutoTokenizer.from_pretrained(toy_folder)


@pytest.fixture(scope="module")
def echo() -> Iterator[EnvironmentRunner]:
    """Never done; gives 1 a turn."""
    with EnvironmentRunner(EnvironmentConfig(name=f"{ZOO}:Echo")) as environments:
        yield environments


@pytest.fixture
def play(engine, tokenizer, echo):
    def play(endpoint=engine.endpoint, *, num=3, group=2, **settings):
        settings = {"max_turns": 3, "context_len": 512, **settings}
        settings["step_samples"] = 1000  # failures of all of them are no reason to stop
        prompts = [chat_prompt(tokenizer, i) for i in range(num)]
        episodes = MultiTurnRollout(
            start_groups(prompts, group, 4),
            GroupEnvironments(settings.pop("environments", echo)),
            tokenizer,
            sampling=settings.pop("sampling", SamplingParams(10)),
            seeds=[settings.pop("seed", 1)] * num,
            **settings,
        )
        return in_order(episodes.finished(endpoint))

    return play


def chat_prompt(tokenizer, number):
    content = [{"role": "user", "content": f"question {number}"}]
    ids = ChatTurns(tokenizer)._encode(
        tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True)
    )
    return Prompt(str(number), torch.tensor(ids), content, {}, f"x:{number}")


class Watched:
    """A real endpoint whose requests and completions are noted; `act` may interfere."""

    def __init__(self, endpoint, act=lambda done: None):
        self.endpoint, self.act = endpoint, act
        self.asked: list = []
        self.done: list = []
        self.lock = threading.Lock()

    @property
    def weight_version(self):
        return self.endpoint.weight_version

    def abort(self, request_ids=None):
        self.endpoint.abort(request_ids)

    def generate(self, requests, **options):
        by_id = {request.request_id: request for request in requests}
        with self.lock:
            self.asked += requests
        for completion in self.endpoint.generate(requests, **options):
            with self.lock:
                self.done.append((by_id[completion.request_id], completion))
                self.act(self.done)
            yield completion

    def turns(self):
        """The requests and completions of each turn, by the name of the episode."""
        found: dict[int, dict] = {}
        for request, completion in self.done:
            name, _, turn = request.request_id.rpartition(" turn ")
            found.setdefault(int(turn), {})[name] = request, completion
        return [found[turn] for turn in sorted(found)]


def samples_of(groups):
    return [sample for group in groups for sample in group.samples]


def in_order(groups):
    return sorted(groups, key=lambda group: group.samples[0].group_id)


def same(left, right):
    """To the bit: tests/rollout/test_endpoint_bits.py, with an engine whose bits do not depend on what
    it computes together."""
    return all(
        torch.equal(a.token_ids, b.token_ids)
        and (a.rollout_logprobs - b.rollout_logprobs).abs().max() < 1e-5
        for a, b in zip(samples_of(left), samples_of(right), strict=True)
    )


def test_three_turns_equal_transformers_on_the_whole(play, oracle):
    """Log-probs to 1e-5 and every route, the rows between turns too."""
    groups = play()
    assert [s.group_id for s in samples_of(groups)] == [4, 4, 5, 5, 6, 6]
    assert torch.equal(torch.stack([g.rewards for g in groups]), torch.full((3, 2), 3.0))
    for sample in samples_of(groups):
        logprobs, routes = score(oracle, sample.token_ids, sample.prompt_len, 1.0)
        mask = sample.loss_mask[sample.prompt_len :]
        response = sample.rollout_logprobs[sample.prompt_len :]
        assert (response - logprobs)[mask].abs().max() < 1e-5
        assert not response[~mask].any()
        got = sample.routing.expert_ids.long().sort(-1).values
        assert torch.equal(got, routes.sort(-1).values)
        assert len(sample.weight_versions) == 3
        ends = [span.end for span in sample.weight_versions]
        assert sample.turn_rewards == tuple((end, 1.0) for end in ends)
        covered = [t for s in sample.weight_versions for t in range(s.start, s.end)]
        assert covered == sample.loss_mask.nonzero().flatten().tolist()
        assert sample.routing.num_cached_rows < sample.prompt_len  # the rest is its own turns'
        assert sample.routing.row_versions == (VersionSpan(0, 0, len(sample.token_ids) - 1),)
    metrics = episode_metrics(groups)
    assert metrics["episode/num_turns"] == 3
    assert 40 < metrics["episode/tool_tokens"] < 160


def test_tokens_are_never_tokenized_again(play, engine, tokenizer):
    watched = Watched(engine.endpoint)
    groups = play(watched)
    turns = watched.turns()
    assert [len(turn) for turn in turns] == [6, 6, 6]
    ambiguous = 0
    for turn, later in itertools.pairwise(turns):
        for name, (request, completion) in turn.items():
            said = completion.output_ids.tolist()
            before = request.token_ids.tolist() + said
            assert later[name][0].token_ids.tolist()[: len(before)] == before
            text = tokenizer.decode(said, skip_special_tokens=True)
            ambiguous += tokenizer.encode(text) != said
    assert ambiguous > 3  # special tokens that the text does not show
    final = {tuple(r.token_ids.tolist() + c.output_ids.tolist()) for r, c in turns[-1].values()}
    assert final == {tuple(s.token_ids.tolist()) for s in samples_of(groups)}


@pytest.mark.release  # environments/test_rollout.py has it without a model
def test_the_same_tokens_each_time_and_after_a_lost_engine(play, engine, tokenizer, echo):
    first = play()
    assert same(first, play())
    assert not same(first, play(seed=2))

    def lose(done):
        if len(done) == 9:
            raise EngineLost("on purpose")

    watched = Watched(engine.endpoint, lose)
    prompts = [chat_prompt(tokenizer, i) for i in range(3)]
    episodes = MultiTurnRollout(
        start_groups(prompts, 2), GroupEnvironments(echo), tokenizer, sampling=SamplingParams(10),
        max_turns=3, context_len=512, seeds=[1, 1, 1],
    )  # fmt: skip
    again = []
    with pytest.raises(EngineLost):
        again += episodes.finished(watched)
    assert not episodes.is_over
    again += episodes.finished(watched)
    assert episodes.is_over
    assert same(first, in_order(again))
    names = [request.request_id for request in watched.asked]
    repeated = {name for name in names if names.count(name) > 1}
    assert 0 < len(repeated) < 6  # only what the lost engine had not answered
    assert len(set(names)) == 18


def test_the_end_of_the_context_and_of_the_turns(play):
    exact = SamplingParams(10, 10)
    groups = play(max_turns=1, sampling=exact)
    assert {(s.finish_reason, len(s.response_ids)) for s in samples_of(groups)} == {("length", 10)}
    (group,) = play(num=1, max_turns=8, context_len=120, sampling=exact)
    for sample in group.samples:
        assert sample.finish_reason == "length"
        assert len(sample.token_ids) <= 120
        assert sample.loss_mask[-1]
    assert all(1 < reward < 8 for reward in group.rewards.tolist())


class OneEndsFirst(Watched):
    """Makes one request of the second turn end after 40 tokens, and the others much later."""

    def generate(self, requests, **options):
        lengths = {
            r.request_id: 40 if "group 4 sample 0" in r.request_id else 400 for r in requests
        }
        requests = [
            dataclasses.replace(
                r, sampling=SamplingParams(lengths[r.request_id], lengths[r.request_id])
            )
            if r.request_id.endswith("turn 1")
            else r
            for r in requests
        ]
        return super().generate(requests, **options)


def test_an_abort_masks_and_keeps_what_there_is(play, engine):
    def stop(done):
        if done[-1][0].request_id.endswith("turn 1") and len(done) == 7:
            engine.endpoint.abort()

    with slow_steps():
        groups = play(OneEndsFirst(engine.endpoint, stop), max_turns=2)
    reasons = [s.finish_reason for s in samples_of(groups)]
    assert reasons.count("abort") == 5
    for group in groups:
        for sample, reward in zip(group.samples, group.rewards, strict=True):
            assert bool(reward.isnan()) == (sample.finish_reason == "abort")
            assert len(sample.routing.expert_ids) == len(sample.token_ids) - 1


def test_an_environment_that_fails_masks_its_episodes(play):
    with EnvironmentRunner(EnvironmentConfig(name=f"{ZOO}:FailsSecond")) as environments:
        groups = play(environments=environments)
        assert environments.num_failed == 6
        assert all(group.rewards.isnan().all() for group in groups)
        assert [len(s.weight_versions) for s in samples_of(groups)] == [2] * 6
    with EnvironmentRunner(EnvironmentConfig(name=f"{ZOO}:Shouts")) as environments:
        (group,) = play(num=1, environments=environments)
        assert group.rewards.isnan().all()
        assert "reset() leaves no room" in environments.first_error
        for sample in group.samples:
            end = len(group.prompt.token_ids)
            assert len(sample.token_ids) == end
            assert sample.weight_versions == (VersionSpan(0, end, end),)
