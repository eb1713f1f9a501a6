"""Splits a sample into turns, and a turn into text, thoughts, tool calls and tool results.

`rollouts/step_*.jsonl` has what follows the prompt as one text, with the special tokens that mark
turns. They are looked for in the notations of common chat templates. A model can write such markers
itself, so the split is for reading; the page also shows the text as it is.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

Part = tuple[str, str, str]
"""(kind, name, text). The kind is `text`, `thought`, `call` or `result`; the name is that of the tool,
if it is known."""


class Turn(NamedTuple):
    role: str
    parts: list[Part]


_BEGINS = re.compile(
    r"<\|im_start\|>(?P<chatml>[\w-]+)[ \t]*\n?"
    r"|<\|start_header_id\|>\s*(?P<llama>[\w-]+)\s*<\|end_header_id\|>\s*"
    r"|<start_of_turn>(?P<gemma>[\w-]+)\n?"
    r"|<\|(?P<glm>system|user|assistant|observation|tool)\|>\n?"
    r"|<\|start\|>(?P<harmony>[\w.-]++)(?:<\|channel\|>(?P<channel>\w++))?[^<]*+<\|message\|>"
    r"|<\uff5c(?P<deepseek>User|Assistant)\uff5c>"
)
_ENDS = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|endoftext|end|return|end_of_text)\|>\s*"
    r"|<end_of_turn>\s*|<\uff5cend\u2581of\u2581sentence\uff5c>|</s>\s*$"
)
_ROLES = {"observation": "tool", "model": "assistant", "ipython": "tool", "Observation": "tool"}
_PARTS = re.compile(
    r"<think>(?P<thought>.*?)(?:</think>|\Z)"
    r"|<tool_call>(?P<call>.*?)(?:</tool_call>|\Z)"
    r"|<tool_response>(?P<result>.*?)(?:</tool_response>|\Z)"
    r"|\[TOOL_CALLS\](?P<mistral>.*)\Z"
    r"|<\|python_tag\|>(?P<python>.*)\Z",
    re.DOTALL,
)
_XML_CALL = re.compile(r"\s*<function=(?P<name>[^>\n]{1,200})>(?P<body>.*)", re.DOTALL)


def turns_of(prompt: Any, completion: str) -> list[Turn]:
    """Return the turns of a sample: those of the prompt, which is a text or chat messages, and those of
    everything that follows it."""
    if not isinstance(prompt, list):
        return [Turn("prompt", [("text", "", str(prompt))]), *_following(completion)]
    messages = [message if isinstance(message, dict) else {} for message in prompt]
    return [*map(_message, messages), *_following(completion)]


def _message(message: dict[str, Any]) -> Turn:
    role, given = str(message.get("role", "")), message.get("content")
    parts: list[Part] = []
    if message.get("reasoning_content"):
        parts.append(("thought", "", str(message["reasoning_content"])))
    for part in given if isinstance(given, list) else [given]:
        text: Any = part
        if isinstance(part, dict) and part.get("type") == "text":
            text = str(part.get("text"))
        if text is not None:
            text = text if isinstance(text, str) else json.dumps(text)
            parts.append(
                ("result" if role == "tool" else "text", str(message.get("name") or ""), text)
            )
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        called = call.get("function", call) if isinstance(call, dict) else call
        parts.append(_call(called))
    return Turn(role, parts or [("text", "", "")])


def _following(text: str) -> list[Turn]:
    """Return the turns of a text that begins in the middle of a turn of the assistant."""
    turns, role, begin = [], "assistant", 0
    for mark in _BEGINS.finditer(text):
        turns.append(_turn(role, text[begin : mark.start()]))
        named = [value for name, value in mark.groupdict().items() if value and name != "channel"]
        role, begin = named[0].lower(), mark.end()
        role = "thought" if mark["channel"] == "analysis" else _ROLES.get(role, role)
    turns.append(_turn(role, text[begin:]))
    first, *rest = turns
    return [first, *(turn for turn in rest if any(text for _, _, text in turn.parts))]


def _turn(role: str, text: str) -> Turn:
    text = _ENDS.sub("", text)
    if role == "thought":
        return Turn("assistant", [("thought", "", text.strip("\n"))])
    parts: list[Part] = []
    close, begins = text.find("</think>"), text.find("<think>")
    if role == "assistant" and close >= 0 and not 0 <= begins < close:
        # The template has begun the thought, at the end of the prompt.
        parts.append(("thought", "", text[:close].strip("\n")))
        text = text[close + len("</think>") :]
    at = 0
    for found in _PARTS.finditer(text):
        parts += _plain(text[at : found.start()])
        at = found.end()
        kind, body = next(
            (name, value) for name, value in found.groupdict().items() if value is not None
        )
        if kind in ("thought", "result"):
            parts.append((kind, "", body.strip("\n")))
        else:
            parts += _calls(body)
    parts += _plain(text[at:])
    if role == "tool":
        parts = [("result" if kind == "text" else kind, name, text) for kind, name, text in parts]
    elif parts and all(kind == "result" for kind, _, _ in parts):
        role = "tool"  # some templates put results into a turn of the user
    return Turn(role, parts or [("text", "", "")])


def _plain(text: str) -> list[Part]:
    return [("text", "", text.strip("\n"))] if text.strip() else []


def _calls(body: str) -> list[Part]:
    if (found := _XML_CALL.match(body)) is not None:
        given = {}
        for piece in found["body"].split("<parameter=")[1:]:  # no pattern, which could take long
            key, _, rest = piece.partition(">")
            given[key] = rest.partition("</parameter>")[0].strip("\n")
        return [("call", found["name"], json.dumps(given, indent=2, ensure_ascii=False))]
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return [("call", "", body.strip("\n"))]
    return [_call(each) for each in (value if isinstance(value, list) else [value])]


def _call(called: Any) -> Part:
    """Return a call that is given as JSON: an object with `name` and `arguments`, or something else."""
    if not isinstance(called, dict) or not isinstance(called.get("name"), str):
        return "call", "", json.dumps(called, indent=2, ensure_ascii=False)
    given = called.get("arguments", called.get("parameters", {}))
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return "call", called["name"], given
    return "call", called["name"], json.dumps(given, indent=2, ensure_ascii=False)
