"""The stock openai client and real agents at the real endpoint; the engine has no model."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from mrl.collect.endpoint import answers
from mrl.collect.endpoint.server import EndpointServer
from mrl.engines.sampling import SamplingParams
from tests.endpoint.speaking import (
    QUESTION,
    Speaking,
    make_record,
    tokenizer,
)
from tests.waiting import wait_until

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture(scope="module")
def server():
    with EndpointServer() as server:
        yield server


@pytest.fixture
def engine():
    return Speaking(tokenizer())


@pytest.fixture
def record(engine, server):
    record = make_record(engine)
    server.app.add("the key", record)
    yield record
    server.app.remove("the key")


@pytest.fixture
def client(record, server):
    import openai  # not at the top: it takes half a second of every worker, which collects all files

    with openai.OpenAI(base_url=server.address, api_key="the key", max_retries=0) as client:
        yield client


def test_chat(client, engine, record):
    messages = list(QUESTION)
    for _ in range(3):
        done = client.chat.completions.create(model="x", messages=messages, logprobs=True)
        messages += [done.choices[0].message, {"role": "user", "content": "x"}]
    (leaf,) = record.leaves
    assert len(leaf.messages) == 6
    said = done.choices[0]
    assert (said.message.content, said.finish_reason) == ("hello", "stop")
    logprobs = [each.logprob for each in said.logprobs.content]
    assert logprobs == leaf.completion.logprobs.tolist()
    assert "".join(each.token for each in said.logprobs.content) == "hello<|im_end|>"
    assert done.usage.prompt_tokens == len(engine.asked[-1].token_ids)
    assert done.usage.completion_tokens == 6
    extra = {"return_token_ids": True}
    done = client.chat.completions.create(model="x", messages=messages, n=2, extra_body=extra)
    assert done.prompt_token_ids == engine.asked[-1].token_ids.tolist()
    assert [choice.token_ids[-1] for choice in done.choices] == [engine.tokenizer.eos_token_id] * 2


def test_a_stream_and_tools(client, engine, record):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    engine.say = lambda request: f"<think>hm</think>I add.{call}"
    record.sampling = SamplingParams(200)
    ask = {"model": "x", "messages": QUESTION, "tools": TOOLS}
    stream = client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    assert [d.reasoning_content for d in deltas if hasattr(d, "reasoning_content")] == ["hm"]
    (found,) = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert (found.function.name, found.function.arguments) == ("add", '{"a": 1}')
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(record.leaves[0].completion.output_ids)
    whole = client.chat.completions.create(**ask).choices[0].message
    called = whole.tool_calls[0].function
    assert (called.name, called.arguments) == (found.function.name, found.function.arguments)
    result = {"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "2"}
    client.chat.completions.create(model="x", messages=[*QUESTION, whole, result], tools=TOOLS)
    assert [len(leaf.messages) for leaf in record.leaves] == [2, 4]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_stream_that_its_agent_closes_is_not_recorded(server, record, monkeypatch, *, is_read):
    """It is larger than the buffers of a connection, so the server notices that it is closed."""
    events = [b": " + b"x" * (1 << 20) + b"\n\n"] * 24
    monkeypatch.setattr(answers, "chat_events", lambda *_: iter([*events, answers.DONE]))
    url, headers = f"{server.address}/chat/completions", {"Authorization": "Bearer the key"}
    body = {"model": "x", "messages": QUESTION, "stream": True}
    with httpx.stream("POST", url, json=body, headers=headers) as answer:
        assert answer.is_success
        num_bytes = sum(map(len, answer.iter_raw())) if is_read else 0
    if is_read:
        assert num_bytes > 24 << 20
    else:
        wait_until(lambda: not record.leaves)
    assert len(record.leaves) == is_read


def test_a_stream_that_is_closed_after_its_last_event_is_recorded(server, record, monkeypatch):
    """As the OpenAI client does, which does not wait for the end of the response."""

    def events(*_):
        yield answers.DONE
        time.sleep(0.3)

    monkeypatch.setattr(answers, "chat_events", events)
    url, headers = f"{server.address}/chat/completions", {"Authorization": "Bearer the key"}
    body = {"model": "x", "messages": QUESTION, "stream": True}
    with httpx.stream("POST", url, json=body, headers=headers) as answer:
        assert next(answer.iter_raw()) == answers.DONE
    time.sleep(0.6)
    assert len(record.leaves) == 1


def test_completions(client, engine):
    done = client.completions.create(model="x", prompt=["a", "b"], n=2, logprobs=1)
    assert [choice.text for choice in done.choices] == ["hello"] * 4
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.choices[0].logprobs.tokens == [*"hello", "<|im_end|>"]
    assert done.usage.prompt_tokens == 2
    extra = {"return_token_ids": True}
    done = client.completions.create(model="x", prompt=[5, 6], extra_body=extra).choices[0]
    assert done.prompt_token_ids == [5, 6]
    ids = [5, 6, *done.token_ids, 7]
    again = client.completions.create(model="x", prompt=ids, extra_body=extra).choices[0]
    assert again.prompt_token_ids == ids == engine.asked[-1].token_ids.tolist()
    chunks = list(client.completions.create(model="x", prompt="c", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello"


def test_the_forms_of_train_clients(client, engine, record, server):
    """`/tokenize` and `/v1/chat/completions/tokens` of verifiers 0.1, and the `/inference/v1/generate`
    that its renderers ask."""
    root = client.with_options(base_url=server.address.removesuffix("/v1"))
    body = {"model": "x", "messages": QUESTION}
    ids = root.post("/tokenize", body=body, cast_to=object)["tokens"]
    assert ids == record.prompt.token_ids.tolist()
    some = root.post("/tokenize", body={**body, "add_generation_prompt": False}, cast_to=object)
    assert ids[: some["count"]] == some["tokens"] != ids
    assert root.post("/tokenize", body={"prompt": "ab"}, cast_to=object)["count"] == 2
    ids += [4, 5]
    body |= {"tokens": ids, "logprobs": True, "return_token_ids": True}
    done = client.post("/chat/completions/tokens", body=body, cast_to=object)
    assert done["prompt_token_ids"] == ids
    ids += done["choices"][0]["token_ids"]
    params = {"max_tokens": 3, "stop_token_ids": [9], "logprobs": 1, "skip_special_tokens": False}
    body = {"model": "x", "token_ids": [*ids, 6], "sampling_params": params}
    done = root.post("/inference/v1/generate", body=body, cast_to=object)["choices"][0]
    assert done["finish_reason"] == "length"
    (leaf,) = record.leaves
    assert leaf.conversation.token_ids.tolist() == [*ids, 6, *done["token_ids"]]
    logprobs = [each["logprob"] for each in done["logprobs"]["content"]]
    assert logprobs == leaf.completion.logprobs.tolist()
    names = [each["token"] for each in done["logprobs"]["content"]]
    assert names == [f"token_id:{each}" for each in done["token_ids"]]  # as in vLLM
    models = client.models.list().data
    assert [(model.id, model.max_model_len) for model in models] == [("policy", 500)]
    assert client.models.retrieve("a/b").id == "a/b"


def test_what_is_refused(client, engine, record, server):
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature is"):
        client.chat.completions.create(model="x", messages=QUESTION, temperature=0.3)
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.completions.create(model="x", prompt=[1] * 500)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings here"):
        client.embeddings.create(model="x", input="y")
    with pytest.raises(openai.AuthenticationError, match="no running episode has this key"):
        client.with_options(api_key="other").chat.completions.create(model="x", messages=QUESTION)
    url = f"{server.address}/chat/completions"
    headers = {"Authorization": "Bearer the key"}
    for more, body, status in (
        ({"Origin": "http://x.org"}, "{}", 403),
        ({"Host": "x.org"}, "{}", 403),
        ({}, "[]", 400),
        ({}, "{", 400),
        ({}, '{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400),
        ({}, "[" * 100000, 400),
        ({}, " " * ((32 << 20) + 1), 413),
    ):
        answer = httpx.post(url, content=body, headers=headers | more)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
    for body, says in (
        ({"prompt": ["x"]}, "prompt is ['x'], expected a text"),
        ({"messages": QUESTION, "add_generation_prompt": "no"}, "add_generation_prompt is 'no'"),
    ):
        answer = httpx.post(
            url.replace("/v1/chat/completions", "/tokenize"), json=body, headers=headers
        )
        assert (answer.status_code, says in answer.text) == (400, True), answer.text
    assert not engine.asked


def test_a_caller_that_goes_away_is_not_recorded(client, engine, record):
    going, gone = threading.Event(), threading.Event()

    def say(request):
        going.set()
        assert gone.wait(60)
        return "late"

    engine.say = say
    hasty = client.with_options(timeout=1.0)
    import openai

    with pytest.raises(openai.APITimeoutError):
        hasty.chat.completions.create(model="x", messages=QUESTION)
    assert going.is_set()
    wait_until(lambda: engine.aborted)
    gone.set()
    engine.say = lambda request: "in time"
    client.chat.completions.create(model="x", messages=QUESTION)
    assert [leaf.text for leaf in record.leaves] == ["in time"]
