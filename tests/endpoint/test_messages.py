"""Messages of an agent that are read, and those that are refused."""

from __future__ import annotations

import pytest
import torch

from mrl.collect.endpoint.refused import Refused
from tests.endpoint.speaking import QUESTION, Speaking, make_record, tokenizer
from tests.endpoint.test_record import ask


@pytest.fixture
def engine():
    return Speaking(tokenizer())


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "expected a list of messages"),
        ("hi", "expected a list of messages"),
        ([{"role": "boss", "content": "x"}], "role 'boss'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": 3}], "content is 3"),
        ([*QUESTION, {"role": "assistant", "content": "x"}], "the last message is the assistant's"),
        ([{"role": "assistant", "tool_calls": [3]}], "expected a call of a function"),
    ],
)
def test_messages_that_are_refused(engine, messages, match):
    with pytest.raises(Refused, match=match):
        ask(make_record(engine), messages)


def test_parts_of_text_are_joined(engine):
    record = make_record(engine)
    parts = [{"type": "text", "text": "ques"}, {"type": "text", "text": "tion"}]
    ask(record, [{"role": "user", "content": parts}])
    assert torch.equal(engine.asked[0].token_ids, record.prompt.token_ids)
