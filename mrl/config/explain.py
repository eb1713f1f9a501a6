"""Puts what pydantic finds wrong with a recipe into one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mrl.config.reward import TAGS
from mrl.config.suggest import all_keys, suggest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MEMBER = re.compile(r"int|float|constrained-(int|float)|literal\[.*\]")
"""The last part of the location of a problem where pydantic tried one type of a union."""
EXPECTED = {
    "dict_type": "expected a mapping of keys to values",
    "tuple_type": "expected a list",
    "string_type": "expected a text",
}
"""What is said of types that a recipe knows by other names than Python."""
EXAMPLES = {
    "model": "{path: models/Qwen3-30B-A3B}",
    "model.path": "models/Qwen3-30B-A3B",
    "train": "{num_steps: 100, micro_batch_tokens: 8192}",
    "rollout": "{prompts_per_step: 32, samples_per_prompt: 8, max_response_len: 1024}",
    "rollout.max_response_len": "1024",
    "data": "{path: data/train.jsonl}",
    "output_dir": "first_run",
}
"""What a required key may hold, for the message about an empty one."""
USUAL_KEYS = ("path", "name")
"""The key that a text in the place of a whole branch most likely belongs to."""


def explain(error: ValidationError, known: Sequence[str] = ()) -> str:
    """Return all problems of a recipe in one line: key, what is wrong, what was given.

    `known` are the keys to suggest for an unknown one; by default those of a recipe.
    """
    lines = []
    problems = error.errors()
    for key, members in _of_unions(problems).items():
        messages = ", or: ".join(member["msg"] for member in members)
        given = members[0]["input"]
        lines.append(_empty(key) if given is None else f"{key}: {messages}, got {given!r}")
        problems = [problem for problem in problems if problem not in members]
    return "; ".join([*lines, *(_line(problem, known) for problem in problems)])


def _line(problem: ErrorDetails, known: Sequence[str]) -> str:
    place = [part for part in problem["loc"] if part not in TAGS]
    key, given = ".".join(map(str, place)), problem["input"]
    if problem["type"] == "extra_forbidden":
        named = ".".join(part for part in place if isinstance(part, str))
        return f"unknown key {key!r}{suggest(named, given, known)}"
    if problem["type"] == "missing":
        return f"{key}: required, and not given"
    if given is None:
        return _empty(key)
    message = problem["msg"].removeprefix("Value error, ")  # pydantic's, before a validator's own
    if problem["type"] == "value_error" and isinstance(given, dict):
        # It names the keys itself, and the whole branch would hide them.
        return f"{key}: {message}"
    if problem["type"] == "model_type":
        return f"{key}: {_keys_below(key, given)}, got {given!r}"
    if problem["loc"][-1] == TAGS[0]:
        return f"{key}: expected the name of a reward, or a list of rewards, got {given!r}"
    return f"{key}: {EXPECTED.get(problem['type'], message)}, got {given!r}"


def _empty(key: str) -> str:
    """Say that a key has no value, and what one looks like."""
    if key in EXAMPLES:
        return f"{key}: empty, and required; give a value, for example {key}: {EXAMPLES[key]}"
    return f"{key}: empty; give it a value, or leave the key out for its default"


def _keys_below(key: str, given: Any) -> str:
    """Say that a branch has keys; which one it was, where a text was given in its place."""
    own = [each for each in all_keys() if each.startswith(f"{key}.")]
    usual = [f"{key}.{name}" for name in USUAL_KEYS if f"{key}.{name}" in own]
    if isinstance(given, str) and usual:
        return f"expected a mapping of keys; did you mean {usual[0]}"
    return f"expected a mapping of keys{f', such as {own[0]}' if own else ''}"


def _of_unions(problems: list[ErrorDetails]) -> dict[str, list[ErrorDetails]]:
    """Return the problems of fields of a union type by key: pydantic reports one for each type."""
    found: dict[str, list[ErrorDetails]] = {}
    for problem in problems:
        *path, member = problem["loc"]
        if path and MEMBER.fullmatch(str(member)):
            found.setdefault(".".join(str(part) for part in path), []).append(problem)
    return found
