"""Environments that use OpenAI's chat messages: `messages -> (messages, reward, done)`.

`environment.arguments.target` names the user's code, as `file.py:NAME` or `package.module:NAME`.
NAME is a function or a class. Each episode creates an instance of the class, with the other
`environment.arguments` as keyword arguments. The function or instance is called once per turn with
the whole conversation and the other columns of the prompt's row:

    target(messages, **columns) -> (new_messages, reward, done)

`messages` are `{"role", "content"}` objects; the last is the policy's turn. If that turn contains
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (the format of Hermes and Qwen), the
message also has `tool_calls`: `[{"id", "type": "function", "function": {"name", "arguments"}}]`,
where `arguments` is a JSON string, as in OpenAI's API. Ids are unique within a conversation.
`new_messages` follow the policy's turn, for example `{"role": "tool", "content": ...}` for the
output of a tool, or a message of role `user`. A class may also have

    reset(messages, seed, **columns) -> new_messages or None

This method returns the messages that follow the prompt.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from mrl.environments.base import Message, StepResult
from mrl.errors import InputError
from mrl.system.calls import unaccepted_column, why_not
from mrl.system.json_text import unpaired_surrogate
from mrl.system.plugins import Kind, resolve

_TOOL_CALL, _END = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL), "</tool_call>"
_TARGET = Kind(
    noun="environment.arguments.target",
    package="mrl.environments",
    not_plugins=frozenset(),
    form="object",
    example="NAME",
)


def tool_call_blocks(text: str) -> Iterator[re.Match[str]]:
    """Yield the blocks `<tool_call>...</tool_call>` of a text; group 1 is what they hold.

    No block begins after the last end. To look for one there would take long where a policy says
    `<tool_call>` again and again: the square of their number.
    """
    return _TOOL_CALL.finditer(text, 0, text.rfind(_END) + len(_END))


def tool_calls(text: str, taken: Collection[str | None] = ()) -> list[dict[str, Any]]:
    """Return the well-formed tool calls in a turn of the policy, in OpenAI's format.

    The calls get the ids `call_0`, `call_1` and so on; ids in `taken` are skipped. A malformed tool
    call is left out; its text remains in the turn. A call is malformed if it is not JSON, if its name
    is no text, if its arguments are no object, or if it has half of a surrogate pair, which no client
    could send back; arguments that are missing or null are empty.
    """
    calls = []
    ids = (name for k in itertools.count() if (name := f"call_{k}") not in taken)
    for block in tool_call_blocks(text):
        try:
            call = json.loads(block[1])
            name, arguments = call["name"], call.get("arguments")
            arguments = {} if arguments is None else arguments
            if not (isinstance(name, str) and isinstance(arguments, dict)):
                continue
            if unpaired_surrogate([name, arguments]):
                continue
            function = {"name": name, "arguments": json.dumps(arguments)}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        calls.append({"id": next(ids), "type": "function", "function": function})
    return calls


def _call_ids(messages: list[Message]) -> set[str | None]:
    """Return the ids of all tool calls so far, including those in the prompt."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return {call.get("id") for call in calls if isinstance(call, dict)}


def check_target(target: str, columns: Collection[str], source: str) -> None:
    """Raise InputError if `target` or its reset() cannot be called with the columns of a row.

    `source` names the row in the message.
    """
    found: Any = resolve(_TARGET, target)
    is_class = inspect.isclass(found)
    calls = [(found.__call__ if is_class else found, 1, "the call")]
    if is_class and (begin := getattr(found, "reset", None)) is not None:
        calls.append((begin, 2, "reset()"))
    for function, num_positional, what in calls:
        name = unaccepted_column(function, num_positional, columns, is_unbound=is_class)
        if name is not None:
            why = why_not(function, num_positional, (name,), is_unbound=is_class)
            raise InputError(
                f"{source}: column {name!r} cannot be passed to {what} of environment.arguments.target "
                f"{target!r}: {why}; rename the column (data.columns: {{NEW: {name}}}), or leave it "
                f"out ({{{name}: null}})"
            )


class Environment:
    def __init__(self, target: str, **arguments: Any) -> None:
        if ":" not in target:
            raise InputError(
                f"environment.arguments.target {target!r}: expected file.py:NAME or module:NAME"
            )
        found: Any = resolve(_TARGET, target)
        self._target: Any = found(**arguments) if inspect.isclass(found) else found
        self._messages: list[Message] = []
        self._columns: dict[str, Any] = {}

    def reset(self, prompt: Any, seed: int, /, **columns: Any) -> list[Message] | None:
        self._columns = columns
        self._messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
        begin = getattr(self._target, "reset", None)
        added = _checked(begin(self._messages, seed, **columns), "reset()") if begin else []
        self._messages += added
        return added or None

    async def step(self, action: str) -> StepResult:
        turn: Message = {"role": "assistant", "content": action}
        if calls := tool_calls(action, _call_ids(self._messages)):
            turn["tool_calls"] = calls
        self._messages.append(turn)
        answer = self._target(list(self._messages), **self._columns)
        if inspect.isawaitable(answer):
            answer = await answer
        if not isinstance(answer, (tuple, list)) or len(answer) != 3:
            raise ValueError(
                f"the target returned {answer!r:.200}, expected (new_messages, reward, done)"
            )
        added, reward, done = answer
        added = _checked(added, "the target")
        self._messages += added
        return StepResult(added or None, reward, done)


def _checked(added: Any, what: str) -> list[Message]:
    """Return new messages. A text would become one message for each of its letters."""
    if added is not None and not isinstance(added, (list, tuple)):
        raise ValueError(
            f"{what} returned {added!r:.200} as new messages, expected a list of messages or None"
        )
    return list(added or [])
