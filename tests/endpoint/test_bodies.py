"""Fields of requests: what is read, what is refused in one line, and what has no effect."""

from __future__ import annotations

import pytest

from mrl.collect.endpoint.bodies import NO_EFFECT, read_chat, read_completion, read_generate
from mrl.collect.endpoint.refused import Refused
from mrl.engines.sampling import SamplingParams

OWN = SamplingParams(40, temperature=0.5, top_p=0.9, top_k=7)
CHAT = {"model": "any", "messages": [{"role": "user", "content": "x"}]}


def test_what_is_read():
    ask = read_chat(
        {
            **CHAT, "max_tokens": 9, "max_completion_tokens": 5, "n": 2, "stop": "a", "seed": -3,
            "logprobs": True, "stream": True, "stream_options": {"include_usage": True},
            "temperature": 0.5, "top_p": 0.9, "top_k": 7, "tools": [{"type": "function"}],
        },
        OWN,
    )  # fmt: skip
    assert (ask.asked.max_tokens, ask.asked.num_answers, ask.asked.seed) == (5, 2, -3)
    assert ask.asked.stop == ("a",)
    assert ask.asked.parses_tools
    assert (ask.wanted.logprobs, ask.wanted.streams, ask.wanted.usage) == (True, True, True)
    assert not read_chat({**CHAT, "tools": [{}], "tool_choice": "none"}, OWN).asked.parses_tools
    several = read_completion({"prompt": ["a", [1, 2]], "logprobs": 1, "stop": ["b", "c"]}, OWN)
    assert several.prompts == ["a", [1, 2]]
    assert several.asked.stop == ("b", "c")
    assert several.wanted.logprobs
    assert read_completion({"prompt": [1, 2]}, OWN).prompts == [[1, 2]]
    given = {"max_tokens": 3, "stop_token_ids": [4], "logprobs": 1, "skip_special_tokens": False}
    ask = read_generate({"model": "m", "token_ids": [1], "sampling_params": given}, OWN)
    assert (ask.tokens, ask.asked.max_tokens, ask.asked.stop_token_ids) == ([1], 3, (4,))


def test_what_changes_nothing_is_accepted():
    neutral = {
        "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "top_logprobs": 0,
        "response_format": {"type": "text"}, "parallel_tool_calls": True, "tool_choice": "auto",
        "min_tokens": 0, "repetition_penalty": 1.0, "seed": None, "audio": None, "stop": None,
    }  # fmt: skip
    assert read_chat({**CHAT, **neutral, **dict.fromkeys(NO_EFFECT, "x")}, OWN).asked.stop == ()


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        (
            "temperature",
            1.0,
            r"temperature is 1.0, but the policy is trained at rollout.temperature=0",
        ),
        ("temperature", 0, "temperature is 0"),
        ("top_p", 1, "top_p is 1"),
        ("top_k", -1, "top_k is -1"),
        ("min_tokens", 3, "min_tokens is 3"),
        ("n", 0, "n is 0, expected an integer of at least 1"),
        ("n", 1000, "at most 128"),
        ("max_tokens", 1.5, "max_tokens is 1.5"),
        ("max_tokens", True, "max_tokens is True"),
        ("seed", "x", "seed is 'x'"),
        ("stop", [""], "stop is"),
        ("stop", 3, "stop is 3"),
        ("logprobs", 5, "logprobs is 5"),
        ("top_logprobs", 3, "top_logprobs is 3, which is not supported"),
        ("frequency_penalty", 0.1, "frequency_penalty is 0.1"),
        ("parallel_tool_calls", False, "parallel_tool_calls is False"),
        ("parallel_tool_calls", 1, "parallel_tool_calls is 1"),
        ("response_format", {"type": "json_object"}, "response_format is"),
        ("tool_choice", "required", "tool_choice is 'required'"),
        ("tools", {}, None),
        ("tools", "x", "tools is 'x'"),
        ("stream", "yes", "stream is 'yes'"),
        ("stream_options", {"other": 1}, "stream_options is"),
        ("guided_json", {}, "'guided_json' is not supported here; leave it out"),
        ("reasoning_effort", "high", "'reasoning_effort' is not supported"),
    ],
)
def test_what_is_refused(field, value, match):
    if match is None:
        assert read_chat({**CHAT, field: value}, OWN).tools == ""
        return
    with pytest.raises(Refused, match=match) as caught:
        read_chat({**CHAT, field: value}, OWN)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [None, 3, [-1], [1.5], ["a", 3], [True], {}])
def test_prompts_that_are_refused(prompt):
    with pytest.raises(Refused, match="prompt is"):
        read_completion({"prompt": prompt}, OWN)
