"""Messages of OpenAI's chat API: their common form, and what an answer's text contains."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.collect.endpoint.refused import Refused
from mrl.data.template import ROLES
from mrl.environments.openai_chat import tool_call_blocks, tool_calls
from mrl.system.json_text import unpaired_surrogate

Message = dict[str, Any]
THINK, END_THINK = "<think>", "</think>"
REASONING = ("reasoning_content", "reasoning")
"""Names under which clients send the reasoning of an earlier answer."""
KEPT = ("name", "tool_call_id")
UNSUPPORTED = ("function_call", "audio")
"""What the policy would not see."""


@dataclass(frozen=True)
class Parsed:
    """The parts of an answer's text."""

    content: str
    """The text without reasoning and tool calls."""
    reasoning: str | None = None
    """The text between `<think>` and `</think>`; None if there is none."""
    calls: tuple[dict[str, Any], ...] = ()
    """Tool calls in OpenAI's form."""

    def message(self) -> Message:
        """Return the answer as a message of the role `assistant`."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": list(self.calls)}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message


def parse_answer(text: str, *, with_tools: bool, taken: Collection[str]) -> Parsed:
    """Return the parts of an answer. Tool calls are only looked for if the request has tools; their ids
    are not among `taken`."""
    reasoning = None
    if END_THINK in text:
        before, _, text = text.partition(END_THINK)
        reasoning, text = before.strip().removeprefix(THINK).strip("\n"), text.lstrip("\n")
    elif text.lstrip().startswith(THINK):  # cut off while it was thinking
        reasoning, text = text.lstrip().removeprefix(THINK).strip("\n"), ""
    if not with_tools:
        return Parsed(text, reasoning)
    calls: list[dict[str, Any]] = []
    kept, start = "", 0
    for block in tool_call_blocks(text):
        found = tool_calls(block.group(), {*taken, *(call["id"] for call in calls)})
        if found:  # a malformed call stays in the text
            calls += found
            kept, start = kept + text[start : block.start()], block.end()
    if calls:
        text = (kept + text[start:]).strip()
    return Parsed(text, reasoning, tuple(calls))


def call_ids(messages: Sequence[Message]) -> set[str]:
    """Return the ids of all tool calls in some messages."""
    return {call["id"] for message in messages for call in message.get("tool_calls") or ()}


def read_messages(given: Any) -> list[Message]:
    """Return the messages of a request in their common form: text as a string, and no keys without a
    value. Raises Refused."""
    if not isinstance(given, list) or not given:
        raise Refused(400, f"messages is {_shown(given)}, expected a list of messages")
    return [_message(each, i) for i, each in enumerate(given)]


def _message(given: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(given, dict) or given.get("role") not in (*ROLES, "function"):
        role = given.get("role") if isinstance(given, dict) else given
        raise Refused(
            400, f"{where} has the role {_shown(role)}, expected one of {', '.join(ROLES)}"
        )
    for name in UNSUPPORTED:
        if given.get(name) is not None:
            raise Refused(400, f"{where}.{name} is not supported here; send content and tool_calls")
    message: Message = {"role": given["role"], "content": _text(given.get("content"), where)}
    calls = given.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Refused(400, f"{where}.tool_calls is {_shown(calls)}, expected a list")
        places = [f"{where}.tool_calls[{k}]" for k in range(len(calls))]
        message["tool_calls"] = list(map(_call, calls, places))
    reasoning = next((given[name] for name in REASONING if given.get(name)), None)
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    for name in KEPT:
        if isinstance(given.get(name), str):
            message[name] = given[name]
    return message


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"{where}.content is {_shown(content)}, expected text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
            raise Refused(
                400, f"{where}.content has a part of type {kind!r}; only text is supported"
            )
        texts.append(part["text"])
    return "".join(texts)


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(400, f"{where} is {_shown(given)}, expected a call of a function")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {
        "id": str(given.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Return messages as chat templates expect them: the arguments of tool calls are objects, unless
    they are no JSON, or have half of a surrogate pair, which tokenizers cannot encode."""
    return [
        {**message, "tool_calls": [_parsed_call(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
        if unpaired_surrogate(arguments):
            return call
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def continues(messages: Sequence[Message], earlier: Sequence[Message]) -> bool:
    """Return whether `messages` begin with the messages `earlier`, and have more.

    A client may leave out the reasoning of an answer; if it sends the reasoning, it must be the same.
    """
    if len(messages) <= len(earlier):
        return False
    return all(map(_same, messages, earlier))


def sharing(messages: Sequence[Message], earlier: Sequence[Message]) -> tuple[Message, ...]:
    """Return `messages`, with the objects of `earlier` in the place of equal ones. Otherwise each
    request of a conversation would keep its own copy of all the texts before it."""
    begins = [
        known if given == known else given for given, known in zip(messages, earlier, strict=False)
    ]
    return (*begins, *messages[len(begins) :])


def _same(given: Message, known: Message) -> bool:
    if "reasoning_content" not in given:
        known = {key: value for key, value in known.items() if key != "reasoning_content"}
    return given == known


def _shown(value: Any) -> str:
    return repr(value)[:200]
