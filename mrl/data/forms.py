"""Converts rows in the forms of several frameworks to a common form (`Row`): a prompt, optionally a
completion, and columns.

The prompt is in the column `prompt_key`. If `prompt_key` is not given, the prompt is in the first of
these columns that the row has: `prompt` (a string or messages, as in verl), `messages` (TRL),
`conversations` (ShareGPT, whose messages have `from` and `value`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mrl.data.files import kind
from mrl.errors import InputError

Columns = Mapping[str, str | None]

PROMPT_KEYS = ("prompt", "messages", "conversations")
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


@dataclass(frozen=True)
class Row:
    """A row of a file in the common form."""

    source: str
    prompt: Any
    """A string or a list of messages with `role` and `content`."""
    completion: str | None
    """The expected answer: the last message of `messages` or `conversations` if it is the
    assistant's, otherwise the row's `completion`. None if the row has neither."""
    columns: dict[str, Any]
    """The row's columns other than the prompt, for the reward."""
    form: str
    """The form of the original row in words, such as "ShareGPT, `conversations`", for messages in the
    terminal."""


def read_form(source: str, values: dict[str, Any], prompt_key: str | None, columns: Columns) -> Row:
    """Convert the row `values`, which is modified, to the common form.

    `prompt_key` is the column with the prompt; None takes the first of PROMPT_KEYS that the row has.
    `columns` maps new names of columns to old names, like `data.columns`. Raises InputError if the
    row has no usable prompt, or lacks a column of `columns`; the message about a missing column
    lists the columns that the row has.
    """
    present = ", ".join(values) or "no columns"
    _rename(values, columns, source, present)
    key = prompt_key or next((key for key in PROMPT_KEYS if key in values), None)
    if key is None or key not in values:
        if {"chosen", "rejected"} <= values.keys():
            raise InputError(
                f"{source}: no `{key or 'prompt'}`; this row has {present}: preference pairs, which "
                "mrl cannot train on; RL needs a prompt, and a reward for what is sampled"
            )
        raise InputError(
            f"{source}: no `{key or 'prompt'}`; this row has {present}; name the column of the prompt "
            "with prompt_key"
        )
    content = values.pop(key)
    if isinstance(content, list):
        content = [_message(each, i, source, key) for i, each in enumerate(content)]
    _check_content(content, source, key)
    form = _form_name(key, content, values)
    completion = None
    if key in ("messages", "conversations") and content[-1]["role"] == "assistant":
        completion = content.pop()["content"]
        if not content:
            raise InputError(f"{source}: `{key}` has nothing before the assistant's turn")
        values.setdefault("completion", completion)
    elif isinstance(values.get("completion"), (str, list)):
        completion = _completion(values["completion"])
    truth = values.get("reward_model")
    if isinstance(truth, dict) and "ground_truth" in truth:
        values.setdefault("answer", truth["ground_truth"])
    return Row(source, content, completion, values, form)


def tools_of(columns: Mapping[str, Any], source: str) -> list[Any] | None:
    """Return the list in the column `tools`, for the chat template; None if the column is missing or
    empty. The column may also contain the list as JSON text.

    Raises InputError if the column contains anything else. `source` names the row in the message.
    """
    tools = columns.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise InputError(f"{source}: `tools` is not valid JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise InputError(f"{source}: `tools` must be a list of JSON schemas, got {kind(tools)}")
    return tools


def _rename(values: dict[str, Any], columns: Columns, source: str, present: str) -> None:
    """Rename columns of `values` in place: `columns` maps new names to old names, and None drops a
    column.

    A renamed column loses its old name. If the old name is a path to a value inside an object
    (`reward_model.ground_truth`), the object stays. Raises InputError if an old name is missing;
    `present` lists the row's columns for the message.
    """
    taken = {}
    for new, old in columns.items():
        if old is None:
            continue
        place: Any = values
        for part in [old] if old in values else old.split("."):
            if not isinstance(place, dict) or part not in place:
                raise InputError(
                    f"{source}: no column `{old}`, which data.columns names for `{new}`; this row has "
                    f"{present}"
                )
            place = place[part]
        taken[new] = place
    for new, old in columns.items():
        values.pop(new if old is None else old, None)
    values.update(taken)


def _form_name(key: str, content: Any, values: dict[str, Any]) -> str:
    shape = "string" if isinstance(content, str) else "messages"
    if "data_source" in values and isinstance(values.get("reward_model"), dict):
        return f"verl rows, `{key}` is a {shape}" if shape == "string" else f"verl rows, `{key}`"
    if key == "conversations":
        return "ShareGPT, `conversations`"
    return f"`{key}`" if key == "messages" else f"`{key}` ({shape})"


def _message(message: Any, index: int, source: str, key: str) -> dict[str, Any]:
    """Return a message with `role` and `content`; ShareGPT's `from` and `value` are converted.

    Raises InputError if `role` or `content` is missing. A message with `tool_calls` may lack
    `content`. `index` is the message's place in the column `key`.
    """
    if not isinstance(message, dict):
        raise InputError(f"{source}: message {index} must be an object, got {kind(message)}")
    # In parquet all messages of a file have the same keys, with null for missing values.
    plain = {name: value for name, value in message.items() if value is not None}
    if "from" in plain and "role" not in plain:
        role = SHAREGPT_ROLES.get(plain["from"]) if isinstance(plain["from"], str) else None
        if role is None:
            raise InputError(
                f"{source}: message {index} of `{key}` is from {plain['from']!r}, expected one of "
                f"{', '.join(SHAREGPT_ROLES)}"
            )
        plain = {"role": role, "content": plain.get("value")}
    text_may_lack = bool(plain.get("tool_calls"))
    for name in ("role", "content"):
        if name == "content" and text_may_lack:
            plain.setdefault("content", "")
        elif not isinstance(plain.get(name), str) or not plain[name]:
            raise InputError(
                f"{source}: message {index} has no text in `{name}`; it has "
                f"{', '.join(map(str, message)) or 'nothing'}, expected role and content"
            )
    return plain


def _check_content(content: Any, source: str, key: str) -> None:
    if content is None:
        raise InputError(f"{source}: no `{key}`: it is null; give it a text, or remove the row")
    if not isinstance(content, (str, list)):
        raise InputError(
            f"{source}: `{key}` must be a string or a list of messages, got {kind(content)}"
        )
    if not content or (isinstance(content, str) and not content.strip()):
        raise InputError(f"{source}: `{key}` is empty; give it a text, or remove the row")
    if key in ("messages", "conversations") and isinstance(content, str):
        raise InputError(f"{source}: `{key}` must be a list of messages, got a string")


def _completion(completion: str | list[Any]) -> str | None:
    """Return the text of the column `completion`: a string, or the content of the only message in a
    list, if that message is the assistant's (TRL). None for any other list."""
    if isinstance(completion, str):
        return completion
    message = completion[0] if len(completion) == 1 else None
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return None
    text = message.get("content")
    return text if isinstance(text, str) else None
