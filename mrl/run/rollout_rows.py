"""Reads rollouts/step_*.jsonl, which has one line per sample. Errors name the file and the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrl.errors import InputError
from mrl.system.json_text import check_kinds, is_number, parse_row

KINDS = {
    "group_id": "whole",
    "prompt_id": "text",
    "source": "text",
    "prompt": "text|list",
    "completion": "text",
    "reward": "number|null",
    "reward_parts": "object",
    "advantage": "number|null",
    "weight_version": "whole",
    "staleness": "whole",
    "prompt_len": "whole",
    "response_len": "whole",
    "finish_reason": "text|null",
}
"""The types of the values in a row (`mrl.system.json_text.check_kinds`)."""
REQUIRED = ("prompt", "completion", "reward")


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a step, leaving out a last line that a crash cut short.

    Raises InputError if the file cannot be read or a line is damaged.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    rows = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            rows.append(parsed(line))
        except ValueError as error:
            raise InputError(
                f"{file}:{number}: the line is damaged ({error}); restore the file, or leave this step "
                "out"
            ) from None
    return rows


def conversation(prompt: Any, completion: Any) -> list[tuple[str, str]]:
    """Return the turns of a sample as (role, text), the completion last.

    prompt: a text, whose role is then `prompt`, or chat messages. Parts of a message other than text,
    such as tool calls, become JSON.
    """
    if not isinstance(prompt, list):
        return [("prompt", str(prompt)), ("completion", str(completion))]
    messages = [message if isinstance(message, dict) else {} for message in prompt]
    turns = [(str(each.get("role", "")), _content(each)) for each in messages]
    return [*turns, ("assistant", str(completion))]


def _content(message: dict[str, Any]) -> str:
    given = message.get("content")
    parts = given if isinstance(given, list) else [given]
    texts = [
        str(part.get("text")) if isinstance(part, dict) and part.get("type") == "text" else part
        for part in parts
    ]
    texts += [message["tool_calls"]] if message.get("tool_calls") else []
    return "\n".join(t if isinstance(t, str) else json.dumps(t) for t in texts if t is not None)


def parsed(line: bytes) -> dict[str, Any]:
    """Return the row in a line. Raises ValueError if the line is damaged."""
    row = parse_row(line)
    check_kinds(row, KINDS, REQUIRED)
    for name, value in row.get("reward_parts", {}).items():
        if value is not None and not is_number(value):
            raise ValueError(f"the part {name!r} of the reward is not a number")
    return row
