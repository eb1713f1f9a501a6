"""The stock openai client and real agents at the real endpoint; the engine has no model."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
import torch

from mrl.collect.endpoint.agents import Agents
from mrl.collect.endpoint.rollout import AgentRollout, GroupAgents
from mrl.collect.endpoint.server import EndpointServer
from mrl.collect.single_turn import start_groups
from mrl.config import EnvironmentConfig
from mrl.engines.base import EngineLost
from mrl.engines.sampling import SamplingParams
from mrl.errors import RunFailed
from tests.endpoint.speaking import (
    QUESTION,
    SAMPLING,
    Speaking,
    make_prompt,
    make_record,
    tokenizer,
)
from tests.waiting import wait_until

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
AGENT = Path(__file__).with_name("agent.py")


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
    assert whole.tool_calls[0].function == found.function
    result = {"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "2"}
    client.chat.completions.create(model="x", messages=[*QUESTION, whole, result], tools=TOOLS)
    assert [len(leaf.messages) for leaf in record.leaves] == [2, 4]


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
    models = client.models.list().data
    assert [(model.id, model.max_model_len) for model in models] == [("policy", 500)]
    assert client.models.retrieve("a/b").id == "a/b"


def test_what_is_refused(client, engine, record, server):
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
    assert not engine.asked


def test_a_caller_that_goes_away_is_not_recorded(client, engine, record):
    going, gone = threading.Event(), threading.Event()

    def say(request):
        going.set()
        assert gone.wait(60)
        return "late"

    engine.say = say
    hasty = client.with_options(timeout=1.0)
    with pytest.raises(openai.APITimeoutError):
        hasty.chat.completions.create(model="x", messages=QUESTION)
    assert going.is_set()
    wait_until(lambda: engine.aborted)
    gone.set()
    engine.say = lambda request: "in time"
    client.chat.completions.create(model="x", messages=QUESTION)
    assert [leaf.text for leaf in record.leaves] == ["in time"]


def roll_out(engine, kinds, *, num_agents=4, limit_s=60.0, max_turns=3, endpoints=(), **more):
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
                groups += rollout.finished(endpoint)
            except EngineLost:
                assert not rollout.is_over
        assert rollout.is_over
        assert rollout.partial == []
        return {group.prompt.columns["kind"]: group for group in groups}, agents


def test_episodes_advance_on_their_own(engine):
    """Two turns of a good agent while another is at its first; groups come as they are complete."""
    waiting, both = threading.Event(), threading.Event()

    def say(request):
        if "group 0" in request.request_id:
            waiting.set()
            assert both.wait(60)
        elif "answer 1" in request.request_id and "sample 1" in request.request_id:
            assert waiting.wait(60)
            both.set()
        return "hello"

    engine.say = say
    groups, agents = roll_out(engine, ["good", "honest"])
    assert list(groups) == ["honest", "good"]
    for group in groups.values():
        assert group.rewards.tolist() == [5.0, 5.0]
        for sample in group.samples:
            assert sample.num_generated == 12
            assert sample.finish_reason == "stop"
    assert agents.num_failed == agents.num_cut_off == 0


def test_agents_that_misbehave_are_masked(engine):
    kinds = ["good", "dies", "dies later", "lies", "silent", "hangs", "too many turns", "too long"]
    groups, agents = roll_out(engine, kinds, num_agents=16, limit_s=12.0, max_turns=12)
    for kind, group in groups.items():
        assert group.rewards.isnan().tolist() == [kind != "good"] * 2, kind
        reasons = {sample.finish_reason for sample in group.samples}
        assert reasons == {"stop" if kind == "good" else "abort"}
    assert groups["dies later"].samples[0].num_generated == 6
    assert groups["dies"].samples[0].num_generated == 0
    assert agents.num_failed == 10
    assert agents.num_cut_off == 4


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
