"""Reads the bodies of requests. What would change how tokens are sampled, and what is not supported, is
refused; docs/endpoint.md lists what has no effect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mrl.collect.endpoint.messages import Message, read_messages
from mrl.collect.endpoint.refused import Refused
from mrl.collect.endpoint.texts import as_text
from mrl.collect.endpoint.turns import Asked
from mrl.engines.sampling import SamplingParams

MAX_ANSWERS = 128
NO_EFFECT = frozenset(
    {
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "priority", "request_id"),
        *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "prompt_logprobs"),
    }
)
"""Fields that are accepted and do nothing."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "top_logprobs"), (0,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("echo", "ignore_eos", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("use_beam_search", "continue_final_message"), (False,)),
    **dict.fromkeys(("parallel_tool_calls", "add_generation_prompt"), (True,)),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""Fields that are accepted only with a value that changes nothing."""
SAMPLED = ("temperature", "top_p", "top_k")
COMMON = frozenset(
    {
        *("max_tokens", "max_completion_tokens", "n", "stop", "stop_token_ids", "seed"),
        *("logprobs", "stream", "stream_options", "return_token_ids", "min_tokens"),
    }
)


@dataclass(frozen=True)
class Wanted:
    """The form of a response."""

    logprobs: bool = False
    streams: bool = False
    usage: bool = False
    """Whether a stream ends with the numbers of tokens."""
    token_ids: bool = False


@dataclass(frozen=True)
class Ask:
    """A request that has been read."""

    asked: Asked
    wanted: Wanted
    messages: list[Message] = field(default_factory=list)
    tools: str = ""
    tokens: list[int] | None = None
    prompts: list[str | list[int]] = field(default_factory=list)
    """The prompts of a request for completions of text."""


def read_chat(body: Mapping[str, Any], sampling: SamplingParams) -> Ask:
    """Read a request for a chat completion. Its optional `tokens` are the whole prompt as token ids, as
    the token client of verifiers sends it. Raises Refused."""
    known = {"messages", "tools", "tool_choice", "tokens"}
    given = _given(body, known, sampling)
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise Refused(
            400, f"tool_choice is {choice!r:.200}, expected auto or none: the policy chooses itself"
        )
    tools = given.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise Refused(400, f"tools is {tools!r:.200}, expected a list")
    if not isinstance(given.get("logprobs", False), bool):
        raise Refused(400, f"logprobs is {given['logprobs']!r:.200}, expected true or false")
    asked = _asked(given, parses_tools=tools is not None and choice == "auto")
    tokens = _token_ids(given["tokens"], "tokens") if "tokens" in given else None
    messages = read_messages(given.get("messages"))
    return Ask(asked, _wanted(given), messages, as_text(tools), tokens)


def read_completion(body: Mapping[str, Any], sampling: SamplingParams) -> Ask:
    """Read a request for completions of a prompt: text, token ids, or a list of either. Raises
    Refused."""
    given = _given(body, {"prompt"}, sampling)
    prompt = given.get("prompt")
    several = prompt if isinstance(prompt, list) and prompt and not _is_id(prompt[0]) else [prompt]
    prompts = [p if isinstance(p, str) else _token_ids(p, "prompt") for p in several]
    count = given.get("logprobs", 0)
    if isinstance(count, bool) or count not in (0, 1):
        raise Refused(
            400, f"logprobs is {count!r:.200}, expected 0 or 1: that of the sampled token"
        )
    return Ask(_asked(given), _wanted(given | {"logprobs": "logprobs" in given}), prompts=prompts)


def read_generate(body: Mapping[str, Any], sampling: SamplingParams) -> Ask:
    """Read a request of `/inference/v1/generate`, which the renderers of verifiers and prime-rl send:
    `token_ids` and `sampling_params`. Raises Refused."""
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise Refused(400, f"sampling_params is {params!r:.200}, expected an object")
    rest = {key: value for key, value in body.items() if key not in ("sampling_params",)}
    _refuse_unknown(rest, {"token_ids", "stream"})
    if rest.get("stream"):
        raise Refused(400, "stream is true, expected false: ask /v1/completions for a stream")
    given = _given(params, set(), sampling)
    ids = _token_ids(body.get("token_ids"), "token_ids")
    return Ask(_asked(given), Wanted(logprobs=True, token_ids=True), tokens=ids)


def _given(body: Mapping[str, Any], known: set[str], sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields that have a value and an effect. Raises Refused for any that is unknown."""
    _refuse_unknown(body, known | COMMON | set(SAMPLED))
    for name in SAMPLED:
        value, own = body.get(name), getattr(sampling, name)
        if value is not None and (isinstance(value, bool) or value != own):
            raise Refused(
                400,
                f"{name} is {value!r:.200}, but the policy is trained at rollout.{name}={own:g}, and "
                "its log-probs belong to that; leave it out, or change the recipe",
            )
    least = body.get("min_tokens")
    if least is not None and least not in (0, sampling.min_new_tokens):
        raise Refused(
            400, f"min_tokens is {least!r:.200}, expected 0: the recipe sets the least length"
        )
    return {key: body[key] for key in known | COMMON if body.get(key) is not None}


def _refuse_unknown(body: Mapping[str, Any], known: set[str]) -> None:
    for name, value in body.items():
        if value is None or name in known or name in NO_EFFECT:
            continue
        if name not in NEUTRAL:
            raise Refused(400, f"{name[:80]!r} is not supported here; leave it out")
        if not any(type(value) is type(each) and value == each for each in _forms(NEUTRAL[name])):
            raise Refused(
                400, f"{name} is {value!r:.200}, which is not supported here; leave it out"
            )


def _forms(values: tuple[Any, ...]) -> list[Any]:
    """Return the values, integers also as floats."""
    return [*values, *(float(each) for each in values if type(each) is int)]


def _asked(given: Mapping[str, Any], *, parses_tools: bool = False) -> Asked:
    limits = [_number(given, name, 1) for name in ("max_tokens", "max_completion_tokens")]
    stop = given.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) and s for s in stop):
        raise Refused(400, f"stop is {stop!r:.200}, expected a text or a list of texts")
    num = _number(given, "n", 1) or 1
    if num > MAX_ANSWERS:
        raise Refused(400, f"n is {num}, expected at most {MAX_ANSWERS}")
    return Asked(
        num_answers=num,
        max_tokens=min((each for each in limits if each is not None), default=None),
        stop=tuple(stop),
        stop_token_ids=tuple(_token_ids(given.get("stop_token_ids", []), "stop_token_ids")),
        seed=_number(given, "seed", None),
        parses_tools=parses_tools,
    )


def _wanted(given: Mapping[str, Any]) -> Wanted:
    options = given.get("stream_options") or {}
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise Refused(400, f"stream_options is {options!r:.200}, expected only include_usage")
    return Wanted(
        logprobs=bool(given.get("logprobs")),
        streams=_flag(given, "stream"),
        usage=_flag(options, "include_usage"),
        token_ids=_flag(given, "return_token_ids"),
    )


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise Refused(400, f"{name} is {value!r:.200}, expected true or false")
    return value


def _number(given: Mapping[str, Any], name: str, least: int | None) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if type(value) is not int or (least is not None and value < least) or abs(value) >= 1 << 63:
        at_least = "" if least is None else f" of at least {least}"
        raise Refused(400, f"{name} is {value!r:.200}, expected an integer{at_least}")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int


def _token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(_is_id(v) and 0 <= v < 1 << 31 for v in value):
        raise Refused(400, f"{name} is {json.dumps(value)[:200]}, expected a list of token ids")
    return value
