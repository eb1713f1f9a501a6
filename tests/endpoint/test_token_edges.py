"""Answers that end within a token or within a character are continued from their tokens."""

from __future__ import annotations

import pytest
import torch

from mrl.collect.endpoint.answers import chat_response, text_response
from mrl.collect.endpoint.bodies import Wanted
from mrl.collect.endpoint.turns import Asked, Caller
from mrl.engines.sampling import SamplingParams
from tests.endpoint.speaking import QUESTION, Speaking, byte_tokenizer, make_record, tokenizer
from tests.endpoint.test_record import ask, user


@pytest.fixture
def engine():
    return Speaking(tokenizer())


def complete(record, prompt, **asked):
    return record.answer([record.text(prompt)], Asked(**asked), Caller())


@pytest.mark.parametrize("more", ["! two", " two"])
def test_a_stop_text_that_ends_within_a_token_is_not_repeated(engine, more):
    """The token that has the stop text has more, which the agent never saw."""
    engine.say = lambda request: "one!?"
    record = make_record(engine, sampling=SamplingParams(40, stop=("!",)))
    (first,) = complete(record, "count: ")
    assert (first.text, first.stop, first.cut) == ("one", "!", "!?")
    complete(record, f"count: one{more}")
    said = engine.tokenizer.decode(engine.asked[-1].token_ids.tolist())
    assert said == "count: one!?<|im_end|> two"


def test_characters_that_are_cut_in_the_middle():
    """An answer that ends within a character is continued from its tokens, in chats and in texts."""
    engine = Speaking(byte_tokenizer(), lambda request: "a\U0001f600b")
    record = make_record(engine)
    (answer,) = ask(record, QUESTION, Asked(max_tokens=3))
    assert answer.text == "a\ufffd"
    talk = [*QUESTION, answer.parsed.message(), user("go on")]
    (later,) = ask(record, talk)
    assert later.context.parent is answer
    (first,) = complete(record, "x: ", max_tokens=3)
    (second,) = complete(record, f"x: {first.text}")
    assert second.context.parent is first
    assert torch.equal(second.context.conversation.token_ids, first.conversation.token_ids)
    (content,) = chat_response([later], Wanted(logprobs=True), record.texts)["choices"]
    said = [(each["token"], each["bytes"]) for each in content["logprobs"]["content"]]
    assert said == [
        ("a", [97]), *[("\ufffd", None)] * 4, ("b", [98]), ("<|im_end|>", list(b"<|im_end|>")),
    ]  # fmt: skip
    (choice,) = text_response([second], Wanted(logprobs=True), record.texts)["choices"]
    assert choice["text"] == "a\U0001f600b"
