"""Which requests continue an answer, and which begin a conversation. The engine here has no model."""

from __future__ import annotations

import json

import pytest
import torch

from mrl.collect.endpoint.messages import read_messages
from mrl.collect.endpoint.refused import Refused
from mrl.collect.endpoint.texts import as_text
from mrl.collect.endpoint.turns import Asked, Caller
from mrl.data.chat import ChatTurns
from mrl.engines.sampling import SamplingParams
from tests.endpoint.speaking import (
    QUESTION,
    SAMPLING,
    Speaking,
    logprobs_of,
    make_record,
    routes_of,
    tokenizer,
)

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def engine():
    return Speaking(tokenizer())


ONCE = Asked()


def ask(record, messages, asked=ONCE, tools=None):
    messages = read_messages(messages)
    context = record.chat(messages, json.dumps(tools) if tools else "")
    return record.answer([context], asked, Caller())


def say(record, messages, **asked):
    """Ask, and return the conversation that the client then has."""
    (answer,) = ask(record, messages, Asked(**asked))
    return [*messages, answer.parsed.message()]


def sample_of(record, **how):
    (sample,) = record.samples(3, **how)
    return sample


def user(text):
    return {"role": "user", "content": text}


def test_turns_continue_the_sampled_tokens(engine):
    """All that is recorded is what the engine said, position by position."""
    answers = iter(
        ["<|im_start|>odd", "plain", "<|unk|>" * 3]
    )  # special tokens, which no text shows
    engine.say = lambda request: next(answers)
    record = make_record(engine)
    talk = say(record, QUESTION)
    assert talk[-1]["content"] == "odd"
    talk = say(record, [*talk, user("more")])
    say(record, [*talk, {"role": "tool", "content": "4", "tool_call_id": "call_0"}])
    assert [len(leaf.messages) for leaf in record.leaves] == [6]
    first, second, third = engine.asked
    for before, after in ((first, second), (second, third)):
        assert torch.equal(after.token_ids[: len(before.token_ids)], before.token_ids)
    assert len({request.request_id for request in engine.asked}) == 3
    assert {request.seed for request in engine.asked} == {11}
    sample = sample_of(record)
    chosen = sample.loss_mask
    assert torch.equal(sample.rollout_logprobs, logprobs_of(sample.token_ids) * chosen)
    assert torch.equal(sample.routing.expert_ids, routes_of(sample.token_ids).expert_ids)
    assert sample.num_generated == int(chosen.sum()) == sum(map(len, ("?odd", "plain", "???"))) + 3
    assert sample.prompt_len == len(first.token_ids)
    assert sample.finish_reason == "stop"
    text = engine.tokenizer.decode(sample.token_ids.tolist())
    assert text == (
        "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n<|im_start|>odd<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nplain<|im_end|>\n"
        "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n<|unk|><|unk|><|unk|><|im_end|>"
    )


def test_memory_grows_with_the_tokens_and_not_with_the_turns(engine):
    """The turns of a branch share the memory of its newest one, and nothing changes."""
    record = make_record(engine, context_len=5000, max_turns=100)
    talk, kept, before = QUESTION, [], []
    for turn in range(60):
        talk = say(record, [*talk, user("x")] if turn else talk)
        (leaf,) = record.leaves
        kept.append(leaf)
        before.append((leaf.conversation.token_ids.clone(), leaf.conversation.routing))
        if turn == 30:
            middle = talk
    say(record, [*middle, user("another way")])
    for answer, (ids, routing) in zip(kept, before, strict=True):
        assert torch.equal(answer.whole.token_ids, ids)
        assert torch.equal(answer.whole.routing.expert_ids, routing.expert_ids)
        assert torch.equal(routing.expert_ids, routes_of(ids).expert_ids)
    for leaf in record.leaves:
        expected = routes_of(leaf.conversation.token_ids)
        assert torch.equal(leaf.conversation.routing.expert_ids, expected.expert_ids)
        assert leaf.conversation.routing.row_versions == expected.row_versions
    parts = [
        part
        for answer in record._answers
        for found in (answer.conversation, answer.context.conversation)
        for part in (found.token_ids, found.rollout_logprobs, found.loss_mask)
        + (() if found.routing is None else (found.routing.expert_ids,))
        if not part.is_meta
    ]
    assert len(parts) > 300
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 8  # of two branches
    assert all(answer.completion.routing is None for answer in record._answers)


def test_texts_are_kept_once_and_prompts_as_digests(engine):
    """Each request of an agent repeats the whole conversation."""
    record = make_record(engine, context_len=50_000, max_turns=100)
    talk: list[dict] = list(QUESTION)
    for _ in range(20):
        asked = read_messages(json.loads(json.dumps(talk)))
        context = record.chat(asked, as_text(json.loads(json.dumps(TOOLS))))
        (answer,) = record.answer([context], Asked(), Caller())
        assert [*answer.messages[:-1]] == asked
        talk += [answer.parsed.message(), user("x" * 100)]
    assert len({id(each) for answer in record._answers for each in answer.messages}) == 40
    assert len({id(answer.context.tools) for answer in record._answers}) == 1
    assert {len(digest) for digest, _ in record._asked_before} == {32}


def test_an_answer_whose_continuation_is_forgotten_keeps_its_routes(engine):
    record = make_record(engine)
    talk = say(record, QUESTION)
    (first,) = record.leaves
    caller = Caller()
    record.answer([record.chat([*talk, user("x")], "")], Asked(), caller)
    assert first.conversation.routing.expert_ids.is_meta
    record.drop(caller)
    for _ in range(2):
        sample = sample_of(record)
        assert torch.equal(sample.routing.expert_ids, routes_of(sample.token_ids).expert_ids)
        say(record, [*talk, user("y")])
    assert len(record.leaves) == 2


def test_a_rewritten_history_is_a_branch(engine):
    record = make_record(engine)
    talk = say(record, QUESTION)
    longer = say(record, [*talk, user("a longer way")])
    say(record, [*longer, user("and on")])
    say(record, [*talk, user("another way")])  # from the first answer
    say(record, [user("a summary"), user("go on")])  # from nothing
    say(
        record, [*QUESTION, {"role": "assistant", "content": "hellO"}, user("x")]
    )  # not its own words
    assert [len(leaf.messages) for leaf in record.leaves] == [6, 4, 3, 4]
    sample = sample_of(record)
    assert "and on" in engine.tokenizer.decode(sample.token_ids.tolist())
    assert int(sample.loss_mask.sum()) == 3 * len("hello.")
    foreign = record.leaves[-1].conversation
    assert int(foreign.loss_mask.sum()) == len("hello.")
    assert foreign.prompt_len == len(foreign.token_ids) - len("hello.")


def test_branches_of_a_tree_train_each_token_once(engine):
    record = make_record(engine)
    talk = say(record, QUESTION)
    longer = say(record, [*talk, user("a longer way")])
    say(record, [*longer, user("and on")])
    say(record, [*talk, user("another way")])
    say(record, [user("a summary"), user("go on")])
    samples = record.samples(3, is_tree=True)
    assert [int(sample.loss_mask.sum()) for sample in samples] == [18, 6, 6]
    assert sum(sample.num_generated for sample in samples) == 5 * len("hello.")
    for sample, leaf in zip(samples, record.leaves, strict=True):
        whole = leaf.conversation
        assert torch.equal(sample.token_ids, whole.token_ids)
        assert torch.equal(sample.routing.expert_ids, whole.routing.expert_ids)
        kept = sample.loss_mask
        assert torch.equal(sample.rollout_logprobs, whole.rollout_logprobs * kept)
        covered = [t for span in sample.weight_versions for t in range(span.start, span.end)]
        assert covered == kept.nonzero().flatten().tolist()
        assert sample.prompt_len == whole.prompt_len
    assert len(record.samples(3, is_tree=True, is_masked=True)) == 1


def test_the_newest_of_equal_branches_is_trained(engine):
    engine.say = lambda request: f"{len(engine.asked)}"
    record = make_record(engine)
    for text in "abc":
        say(record, [user(text)])
    assert "c<|im_end|>" in engine.tokenizer.decode(sample_of(record).token_ids.tolist())


def test_other_tools_begin_another_conversation(engine):
    record = make_record(engine)
    talk = say(record, QUESTION)
    ask(record, [*talk, user("x")], tools=TOOLS)
    assert len(record.leaves) == 2


def test_tool_calls_and_reasoning_come_back_and_continue(engine):
    engine.say = lambda request: (
        f"<think>\nhm\n</think>\n\nI add. {CALL}{CALL}<tool_call>no</tool_call>"
    )
    record = make_record(engine, sampling=SamplingParams(300))
    (answer,) = ask(record, QUESTION, Asked(parses_tools=True), TOOLS)
    message = answer.parsed.message()
    assert answer.finish_reason == "tool_calls"
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "I add. <tool_call>no</tool_call>"  # a malformed one is only text
    assert [call["id"] for call in message["tool_calls"]] == ["call_0", "call_1"]
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    result = {"role": "tool", "content": "2", "tool_call_id": "call_0"}
    for given in (message, {k: v for k, v in message.items() if k != "reasoning_content"}):
        (later,) = ask(record, [*QUESTION, given, result], Asked(parses_tools=True), TOOLS)
        assert later.context.parent is answer
        assert later.parsed.calls[0]["id"] == "call_2"
    (other,) = ask(
        record, [*QUESTION, message | {"reasoning_content": "other"}, result], tools=TOOLS
    )
    assert other.context.parent is None


def test_an_answer_that_was_cut_off_while_thinking(engine):
    engine.say = lambda request: "<think>\nand so on and on"
    record = make_record(engine, sampling=SamplingParams(12))
    (answer,) = ask(record, QUESTION)
    assert answer.finish_reason == "length"
    assert answer.parsed.message() == {
        "role": "assistant", "content": "", "reasoning_content": "and ",
    }  # fmt: skip


def test_text_and_tokens_continue_too(engine):
    record = make_record(engine, sampling=SamplingParams(40, stop=("!",)))
    engine.say = lambda request: "one!"
    caller = Caller()

    def one(context):
        (answer,) = record.answer([context], Asked(), caller)
        return answer

    first = one(record.text("count: "))
    assert first.text == "one"
    second = one(record.text("count: one two "))
    assert second.context.parent is first
    third = one(record.text("count: one! two "))  # the stop text, which the client puts back
    assert third.context.parent is first
    assert torch.equal(third.context.conversation.token_ids, second.context.conversation.token_ids)
    said = engine.tokenizer.decode(second.conversation.token_ids.tolist())
    assert said == "count: one!<|im_end|> two one!<|im_end|>"
    ids = [*second.conversation.token_ids.tolist(), 5, 6]
    fourth = one(record.tokens(ids))
    assert fourth.context.parent is third  # the newest of those with these tokens
    assert fourth.context.conversation.token_ids.tolist() == ids
    assert one(record.tokens([7, *ids])).context.parent is None
    assert len(caller.requests) == 5


def test_several_answers_have_seeds_of_their_own(engine):
    record = make_record(engine)
    ask(record, QUESTION, Asked(num_answers=3))
    ask(record, QUESTION)
    ask(record, QUESTION, Asked(seed=1))
    ask(record, QUESTION, Asked(seed=1))
    seeds = [request.seed for request in engine.asked]
    assert len(set(seeds)) == 6
    assert seeds[0] == 11
    again = make_record(Speaking(engine.tokenizer))
    assert ask(again, QUESTION, Asked(seed=1))[0].completion.request_id.endswith("answer 0")


@pytest.mark.parametrize("room", [0, 1, 2, 6, 7])
def test_the_end_of_the_context(engine, room):
    prompt = len(ChatTurns(engine.tokenizer).beginning(QUESTION, None))
    record = make_record(engine, context_len=prompt + room)
    if not room:
        with pytest.raises(Refused, match="maximum context length is") as caught:
            ask(record, QUESTION)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        assert "no room" in record.cut_off
        assert sample_of(record, is_masked=True).finish_reason == "abort"
        assert sample_of(record).num_generated == 0
        return
    (answer,) = ask(record, QUESTION)
    assert answer.finish_reason == ("stop" if room >= len("hello.") else "length")
    assert len(answer.completion.output_ids) == min(room, len("hello."))
    assert not record.cut_off
    with pytest.raises(Refused, match="maximum context length"):
        say(record, [*QUESTION, answer.parsed.message(), user("x")])
    assert sample_of(record).finish_reason == "length"


def test_the_end_of_the_turns_and_of_the_episode(engine):
    record = make_record(engine, max_turns=3)
    talk = say(record, QUESTION)
    with pytest.raises(Refused, match="3 turns"):
        ask(record, [*talk, user("x")], Asked(num_answers=3))
    assert "turns" in record.cut_off
    ask(record, [*talk, user("x")], Asked(num_answers=2))
    with pytest.raises(Refused, match="print the reward"):
        ask(record, [*talk, user("y")])
    record.end()
    with pytest.raises(Refused, match="over"):
        ask(record, QUESTION)
    assert len(engine.asked) == 3


def test_limits_of_a_request(engine):
    record = make_record(engine)
    (answer,) = ask(record, QUESTION, Asked(max_tokens=2, stop=("l",), stop_token_ids=(9,)))
    assert answer.finish_reason == "length"
    sampling = engine.asked[0].sampling
    assert (sampling.max_new_tokens, sampling.stop, sampling.stop_token_ids) == (2, ("l",), (9,))
    (answer,) = ask(record, QUESTION, Asked(max_tokens=1000, stop=("ll",)))
    assert engine.asked[1].sampling.max_new_tokens == SAMPLING.max_new_tokens
    assert (answer.text, answer.cut) == ("he", "llo")


def test_a_template_that_shows_messages_otherwise_later_is_refused(engine):
    template = engine.tokenizer.chat_template
    counted = template.replace("{{ message['role'] }}", "{{ message['role'] }}{{ loop.length }}")
    engine.tokenizer.chat_template = counted
    record = make_record(engine)
    talk = say(record, QUESTION)
    talk = say(record, [*talk, user("x")])  # as many messages as after the stand-in
    with pytest.raises(Refused, match="the chat template renders the last 1 messages"):
        say(record, [*talk, user("y")])
