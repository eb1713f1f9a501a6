"""An agent with tools by the stock openai client, launch/recipes/agents/calculator_agent.py.

The endpoint is the real one; the engine has no model.
"""

from __future__ import annotations

import io
import json
import runpy
from pathlib import Path

import pytest

from mrl.collect.endpoint.server import EndpointServer
from mrl.engines.sampling import SamplingParams
from tests.endpoint.speaking import Speaking, make_record, tokenizer
from tests.release import release

AGENTS = Path(__file__).parents[2] / "launch/recipes/agents"
CALL = '<tool_call>{"name":"calculate","arguments":{"a":3,"op":"+","b":4}}</tool_call>'
TURNS = f"I ask. {CALL}", "7"


@pytest.fixture(scope="module")
def server():
    with EndpointServer() as server:
        yield server


@pytest.fixture
def play(server, monkeypatch, capsys):
    """Return a function that plays one episode -> its reward and its record."""
    main = runpy.run_path(str(AGENTS / "calculator_agent.py"))["main"]
    monkeypatch.setenv("OPENAI_BASE_URL", server.address)
    monkeypatch.setenv("OPENAI_API_KEY", "key")

    def run(turns=TURNS, **settings):
        engine = Speaking(tokenizer())

        def say(request):
            text = engine.tokenizer.decode(request.token_ids.tolist())
            return turns[text.count("<|im_start|>assistant\n") - 1]

        engine.say = say
        record = make_record(engine, sampling=SamplingParams(200), **settings)
        server.app.add("key", record)
        row = {"prompt": [{"role": "user", "content": "3+4="}], "answer": "7", "seed": 1}
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(row)))
        main()
        return float(capsys.readouterr().out), record

    return run


def text_of(record, leaf):
    ids = leaf.conversation.token_ids.tolist()
    return record.texts.decode(ids, skip_special_tokens=False)


def test_a_call_and_its_result_are_one_conversation(play):
    reward, record = play()
    assert reward == 1
    (leaf,) = record.leaves
    assert text_of(record, leaf) == (
        f"<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n{TURNS[0]}<|im_end|>\n"
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
    )
    (sample,) = record.samples(3)
    assert int(sample.loss_mask.sum()) == len(TURNS[0]) + 1 + 2
    assert len(sample.weight_versions) == 2


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (CALL.replace('"+"', '"/"'), "error: KeyError: '/'"),
        (CALL.replace('"a":3,', ""), "error: KeyError: 'a'"),
        (CALL.replace('"a":3', '"a":"x"'), "error: ValueError"),
    ],
)
def test_a_wrong_call_is_answered(play, call, result):
    reward, record = play((call, "sorry"))
    assert reward == 0
    (leaf,) = record.leaves
    assert f"<|im_start|>tool\n{result}" in text_of(record, leaf)


@pytest.mark.parametrize("every", [False, release(True)], ids=["some", "each"])
def test_conversations_that_end_at_a_length_of_the_context(play, every):
    """From one token of room after the prompt to the end: cut in the call, after it, in the answer."""
    whole = play()[1].leaves[0].conversation
    ends, rewards = [], []
    step = 1 if every else 7
    first, last = whole.prompt_len + 1, len(whole.token_ids) + 1
    for context_len in sorted({*range(first, last + 1, step), *range(last - 3, last + 1)}):
        reward, record = play(context_len=context_len)
        (sample,) = record.samples(3)
        assert sample.token_ids.tolist() == whole.token_ids[: len(sample.token_ids)].tolist()
        assert sample.loss_mask.tolist() == whole.loss_mask[: len(sample.token_ids)].tolist()
        logprobs = whole.rollout_logprobs[: len(sample.token_ids)]
        assert sample.rollout_logprobs.tolist() == logprobs.tolist()
        assert len(sample.token_ids) <= context_len
        ends.append(len(sample.token_ids))
        rewards.append(reward)
    assert (ends[0], ends[-1]) == (whole.prompt_len + 1, len(whole.token_ids))
    if every:
        assert len(set(ends)) == len(TURNS[0]) + 1 + 2
    assert rewards == sorted(rewards)
    assert sum(rewards) == 3  # "7" alone, with its end, and with a token of room


def test_turns_that_are_used_up(play):
    reward, record = play((CALL, CALL, CALL), max_turns=2)
    assert reward == 0
    (sample,) = record.samples(3)
    assert (sample.finish_reason, len(sample.weight_versions)) == ("length", 2)


def test_the_rows_are_those_that_are_written():
    made = runpy.run_path(str(AGENTS / "make_data.py"))
    for name in made["FILES"]:
        assert (AGENTS / name).read_text() == made["lines_of"](name)
