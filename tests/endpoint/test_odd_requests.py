"""Odd answers of the policy and odd requests of agents: none becomes a fault of mrl, and none changes
what the policy reads or what is trained."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mrl.collect.endpoint.answers import chat_response
from mrl.collect.endpoint.app import _parsed
from mrl.collect.endpoint.bodies import Wanted
from mrl.collect.endpoint.generation import Generation
from mrl.collect.endpoint.messages import for_template, read_messages
from mrl.collect.endpoint.refused import Refused
from mrl.collect.endpoint.texts import as_text
from mrl.collect.endpoint.turns import Asked, Caller
from mrl.engines.base import EngineLost, Request
from mrl.engines.sampling import SamplingParams, check_sampling_params
from mrl.errors import InputError
from tests.endpoint.speaking import (
    QUESTION,
    SAMPLING,
    Speaking,
    logprobs_of,
    make_record,
    routes_of,
    tokenizer,
)
from tests.endpoint.test_record import TOOLS, ask, say, user
from tests.waiting import wait_until

DEEP = "[" * 100_000
TALK = [*QUESTION, {"role": "assistant", "content": "hello"}]


@pytest.fixture
def engine():
    return Speaking(tokenizer())


def complete(record, *prompts, caller=None, **asked):
    contexts = [record.text(prompt) for prompt in prompts]
    return record.answer(contexts, Asked(**asked), caller or Caller())


@pytest.mark.parametrize(
    "call",
    [
        '{"name": 5, "arguments": {}}',
        '{"name": null, "arguments": {}}',
        '{"name": ["add"], "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "add", "arguments": {"a": ["\\ud83d"]}}',
        '{"name": "add", "arguments": {"\\ud83d": 1}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": "{}"}',
        '{"name": "add", "arguments": ' + "9" * 5000 + "}",
        '{"name": "add", "arguments": ' + DEEP + "}",
        DEEP,
    ],
    ids=range(12),
)
def test_a_malformed_tool_call_of_the_policy_is_text(engine, call):
    """It must not become an error of the agent's request."""
    engine.say = lambda request: f"<tool_call>{call}</tool_call>"
    record = make_record(engine, sampling=SamplingParams(200_000), context_len=1_000_000)
    (answer,) = ask(record, QUESTION, Asked(parses_tools=True), TOOLS)
    message = answer.parsed.message()
    assert message == {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"}
    assert json.dumps(chat_response([answer], Wanted(), record.texts), ensure_ascii=False).encode()
    engine.say = lambda request: "hello"
    (later,) = ask(record, [*QUESTION, message, user("x")], Asked(parses_tools=True), TOOLS)
    assert later.context.parent is answer


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": {}'])
def test_a_tool_call_may_have_no_arguments(engine, arguments):
    engine.say = lambda request: f'<tool_call>{{"name": "now"{arguments}}}</tool_call>'
    record = make_record(engine, sampling=SamplingParams(200))
    (answer,) = ask(record, QUESTION, Asked(parses_tools=True), TOOLS)
    assert answer.parsed.message()["tool_calls"][0]["function"] == {
        "name": "now",
        "arguments": "{}",
    }


def test_json_of_any_depth_is_no_fault():
    """At some depth Python can still read it, and can no longer write it."""
    for depth in range(700, 1010):
        deep = "[" * depth + "]" * depth
        call = {"function": {"name": "add", "arguments": deep}}
        for_template([{"role": "assistant", "tool_calls": [call]}])
        with pytest.raises(Refused, match=r"the body is (not JSON|a list)"):
            _parsed(deep.encode())


@pytest.mark.parametrize(
    "arguments", [DEEP, "{", "", "NaN", "9" * 5000, {"a": [None]}, '{"a": "\\ud83d"}']
)
def test_odd_arguments_in_a_history_are_no_fault(engine, arguments):
    shown = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
    engine.tokenizer.chat_template = shown + "{% endfor %}" + engine.tokenizer.chat_template
    function = {"name": "add", "arguments": arguments}
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    (answer,) = ask(make_record(engine, context_len=200_000), [*QUESTION, called, user("x")])
    assert answer.text == "hello"


@pytest.mark.parametrize(
    "more", [{"function_call": {"name": "f", "arguments": "{}"}}, {"audio": {"id": "a"}}]
)
def test_what_the_policy_would_not_see_is_refused(more):
    with pytest.raises(Refused, match=rf"messages\[1\].{next(iter(more))} is not supported"):
        read_messages([*QUESTION, {"role": "assistant", "content": "x"} | more])
    assert read_messages([*QUESTION, {"role": "assistant", "content": "x"} | dict.fromkeys(more)])


def test_tools_are_shown_in_the_order_of_their_keys(engine):
    engine.tokenizer.chat_template = "{{ tools | tojson }}" + engine.tokenizer.chat_template
    record = make_record(engine, context_len=1000)
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "a": 1}}]
    record.answer([record.chat(QUESTION, as_text(tools))], Asked(), Caller())
    shown = engine.tokenizer.decode(engine.asked[0].token_ids.tolist())
    assert shown.startswith(json.dumps(tools))


def test_a_prompt_of_text_that_is_repeated_is_the_same_prompt(engine):
    """Also after an empty answer, which it could be taken to continue."""
    engine.say = lambda request: ""
    record = make_record(engine)
    complete(record, "count: ")
    complete(record, "count: ")
    complete(record, "count: 1")
    first, second, third = engine.asked
    assert torch.equal(first.token_ids, second.token_ids)
    assert first.seed != second.seed
    assert len(third.token_ids) == len(first.token_ids) + 2  # the end of the answer, and the 1


def test_prompts_of_one_request_are_asked_at_once_or_not_at_all(engine):
    record = make_record(engine, max_turns=5)
    found = complete(record, "a", "b", num_answers=2)
    assert engine.num_calls == 1
    assert [answer.context.text for answer in found] == ["a", "a", "b", "b"]
    for prompts in (("c", "d" * 600), ("c", "d")):  # too long, too many turns
        with pytest.raises(Refused):
            complete(record, *prompts)
    assert len(engine.asked) == len(record.leaves) == 4


class Strict(Speaking):
    """Refuses stop tokens, before anything is sent."""

    def generate(self, requests, **options):
        if any(request.sampling.stop_token_ids for request in requests):
            raise InputError("stop_token_ids has 999")
        yield from super().generate(requests, **options)


def test_a_request_that_the_engine_refuses_is_no_turn():
    engine = Strict(tokenizer())
    record = make_record(engine, max_turns=2)
    for _ in range(5):
        with pytest.raises(Refused, match="stop_token_ids has 999") as caught:
            ask(record, QUESTION, Asked(stop_token_ids=(999,)))
        assert caught.value.status == 400
    talk = say(record, [*say(record, QUESTION), user("x")])
    assert not record.cut_off
    with pytest.raises(Refused, match="2 turns"):
        ask(record, [*talk, user("y")])
    assert len({request.request_id for request in engine.asked}) == 2


def test_turns_are_counted_among_concurrent_requests(engine):
    met = threading.Barrier(5)
    engine.say = lambda request: str(met.wait(60))
    record = make_record(engine, max_turns=5)

    def one(number):
        try:
            return ask(record, QUESTION)
        except Refused as refused:
            return refused.code

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(one, range(12)))
    assert found.count("max_turns") == 7
    assert len(record.leaves) == 5
    assert len({request.seed for request in engine.asked}) == 5


@pytest.mark.parametrize("stops", [{}, {"stop_token_ids": (9,)}])
def test_the_least_length_near_the_end_of_the_context(engine, stops):
    """A recipe's least length must not make requests that the engine refuses."""
    sampling = SamplingParams(40, min_new_tokens=5, **stops)
    prompt = len(make_record(engine).prompt.token_ids)
    for room in range(1, 9):
        record = make_record(engine, sampling=sampling, context_len=prompt + room)
        ask(record, QUESTION)
        given = engine.asked[-1].sampling
        check_sampling_params(given, 128)
        assert given.max_new_tokens == room
        assert given.min_new_tokens == min(5, room if not stops else room - 1)
    ask(make_record(engine, sampling=sampling), QUESTION, Asked(max_tokens=3))
    check_sampling_params(engine.asked[-1].sampling, 128)


def test_who_has_gone_before_is_not_answered(engine):
    record = make_record(engine)
    with pytest.raises(Refused):
        complete(record, "x", caller=Caller(is_gone=True))
    assert not engine.asked
    assert not record.leaves


class Restarted(Speaking):
    """Is lost with two requests, of which one notices only after the engine has started again."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.has_started_again = threading.Event()
        self.is_lost = True

    def generate(self, requests, **options):
        with self._lock:
            self.asked += requests
        if self.is_lost:
            if len(self.asked) == 2:
                assert self.has_started_again.wait(60)
            raise EngineLost("on purpose")
        yield from super().generate(requests, **options)


def test_a_late_notice_of_a_loss_does_not_lose_the_new_engine():
    """The engine is the same object after its restart."""
    engine = Restarted(tokenizer())
    generation = Generation({})
    generation.open(engine)
    requests = [Request(name, torch.tensor([5]), 1, SAMPLING) for name in "ab"]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(generation.generate, requests[:1], lambda: True)
        wait_until(lambda: len(engine.asked) == 1 and generation.lost)
        generation.open(engine)
        late = pool.submit(generation.generate, requests[1:], lambda: True)
        wait_until(lambda: len(engine.asked) >= 2)
        wait_until(lambda: generation.lost)
        engine.is_lost = False
        generation.open(engine)
        engine.has_started_again.set()
        assert [len(found.result(60)) for found in (first, late)] == [1, 1]
    assert generation.lost is None


@pytest.mark.parametrize("seed", range(3))
def test_whatever_an_agent_does_tokens_are_trained_as_they_were_sampled(seed):
    """Random requests of several threads: continued, rewritten, repeated, refused and dropped ones."""
    engine = Speaking(tokenizer())
    engine.say = lambda request: "ab!?<tool_call>"[: request.seed % 16]
    record = make_record(
        engine, sampling=SamplingParams(12, stop=("!",)), context_len=200, max_turns=300
    )

    def act(number):
        rng = random.Random(1000 * seed + number)
        caller, leaves = Caller(), record.leaves
        old = rng.choice(leaves) if leaves else None
        asked = Asked(num_answers=rng.choice([1, 1, 2]), max_tokens=rng.choice([None, 1, 3]))
        try:
            match rng.randrange(4):
                case 0:
                    known = list(old.messages) if old is not None and rng.random() < 0.8 else []
                    context = record.chat([*known, user(rng.choice("xyz"))], "")
                case 1:
                    text = old.context.text if old is not None else None
                    known = "" if text is None else text + old.text
                    context = record.text(
                        known + rng.choice(["", "! so", " so"]) + "x" * (not known)
                    )
                case 2:
                    known = [] if old is None else old.conversation.token_ids.tolist()
                    context = record.tokens([*known, rng.randrange(90)])
                case _:
                    context = record.tokens([5] * rng.randrange(230))
            record.answer([context], asked, caller)
        except Refused:
            return
        if rng.random() < 0.2:
            record.drop(caller)

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(act, range(150)):
            assert found is None
    record.end()
    assert len(record.leaves) > 10
    shared, newest_first = 0, record.leaves[::-1]
    leaves = sorted(newest_first, key=lambda leaf: -int(leaf.conversation.loss_mask.sum()))
    samples = record.samples(3, is_tree=True)
    for leaf, sample in zip(leaves, samples, strict=True):
        whole = leaf.conversation
        chosen = whole.loss_mask
        assert len(whole.token_ids) <= 200
        assert torch.equal(whole.rollout_logprobs, logprobs_of(whole.token_ids) * chosen)
        for each in (whole, sample):
            expected = routes_of(each.token_ids)
            assert torch.equal(each.routing.expert_ids, expected.expert_ids)
            assert each.routing.row_versions == expected.row_versions
        shared += int(chosen.sum() - sample.loss_mask.sum())
        covered = [t for span in sample.weight_versions for t in range(span.start, span.end)]
        assert covered in (sample.loss_mask.nonzero().flatten().tolist(), [])
    sampled = sum(len(answer.completion.output_ids) for answer in record._answers)
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == sampled
    assert shared > 0
