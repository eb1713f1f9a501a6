"""One-line messages for the problems that pydantic finds in a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mrl.config.reward import TAGS, RewardConfig
from mrl.config.suggest import all_keys, keys_below, suggest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MEMBER = re.compile(r"int|float|constrained-(int|float)|literal\[.*\]")
"""If a value fits no type of a union, pydantic reports an error for each type, and appends the
type's name to the keys in the error's location. This pattern matches such names."""
EXPECTED = {
    "dict_type": "expected a mapping of keys to values",
    "tuple_type": "expected a list",
    "string_type": "expected text",
}
"""Messages for pydantic errors about a value of the wrong type. They name the expected type in the
words of YAML instead of Python."""
EXAMPLES = {
    "model": "{path: models/Qwen3-30B-A3B}",
    "model.path": "models/Qwen3-30B-A3B",
    "train": "{num_steps: 100, micro_batch_tokens: 8192}",
    "rollout": "{prompts_per_step: 32, samples_per_prompt: 8, max_response_len: 1024}",
    "rollout.max_response_len": "1024",
    "data": "{path: data/train.jsonl}",
    "output_dir": "first_run",
}
"""Example values of required keys, for the message about a required key without a value."""
SHOWN = 300
"""Largest number of characters of a value in a message."""
USUAL_KEYS = ("path", "name")
"""If a recipe has a string where a section is expected, the string is probably the value of one of
these keys of the section."""


def explain(error: ValidationError, known: Sequence[str] = ()) -> str:
    """Return one line with all problems that `error` lists: for each the key, what is wrong, and the
    given value.

    `known`: the valid keys, by default all keys of a recipe. For an unknown key, the message suggests
    the nearest valid key.
    """
    lines = []
    problems = error.errors()
    for key, members in _of_unions(problems).items():
        messages = ", or: ".join(member["msg"] for member in members)
        given = members[0]["input"]
        lines.append(_empty(key) if given is None else f"{key}: {messages}, got {_shown(given)}")
        problems = [problem for problem in problems if problem not in members]
    return "; ".join([*lines, *(_line(problem, known) for problem in problems)])


def first_problem(error: ValidationError, whole: str = "") -> str:
    """Return a line with the first problem that `error` lists: the key and what is wrong, but not
    the given value. If the problem belongs to no key, `whole` stands in place of the key; if
    `whole` is empty, the line has no key."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part)[:80] for part in problem["loc"]) or whole
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def _line(problem: ErrorDetails, known: Sequence[str]) -> str:
    place = [part for part in problem["loc"] if part not in TAGS]
    key, given = ".".join(map(str, place)), problem["input"]
    if problem["type"] == "extra_forbidden":
        named = ".".join(part for part in place if isinstance(part, str))
        if named.startswith("reward.") and not known:
            known = [f"reward.{name}" for name in keys_below(RewardConfig)]
        if "." in str(place[-1]) and named in (known or all_keys()):
            branch, _, leaf = named.rpartition(".")
            nested = f"{{{leaf}: {_shown(given)}}}"
            return f"unknown key {key!r}: dots are for overrides; write {branch}: {nested}"
        return f"unknown key {key!r}{suggest(named, given, known)}"
    if problem["type"] == "missing":
        return f"{key}: required, and not given"
    if given is None:
        return _empty(key)
    message = problem["msg"].removeprefix("Value error, ")  # a prefix of pydantic
    if problem["type"] == "value_error" and isinstance(given, dict):
        # The message names the keys; printing the whole branch too would obscure it.
        return f"{key}: {message}"
    if problem["type"] == "model_type":
        return f"{key}: {_keys_below(key, given)}, got {_shown(given)}"
    if problem["loc"][-1] == TAGS[0]:
        return f"{key}: expected the name of a reward, or a list of rewards, got {_shown(given)}"
    return f"{key}: {EXPECTED.get(problem['type'], message)}, got {_shown(given)}"


def _shown(given: Any) -> str:
    """Return a value as a message shows it: the ends of a long one."""
    text = repr(given)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"


def _empty(key: str) -> str:
    """Return the message about a key without a value. For required keys it includes an example
    value."""
    if key in EXAMPLES:
        return f"{key}: empty, but required; give a value, for example {key}: {EXAMPLES[key]}"
    return f"{key}: empty; give it a value, or leave the key out for its default"


def _keys_below(key: str, given: Any) -> str:
    """Return the message that the section `key` must be a mapping of keys. It suggests a key of the
    section if the given value is a string, and otherwise names an example key."""
    own = [each for each in all_keys() if each.startswith(f"{key}.")]
    usual = [f"{key}.{name}" for name in USUAL_KEYS if f"{key}.{name}" in own]
    if isinstance(given, str) and usual:
        return f"expected a mapping of keys; did you mean {usual[0]}"
    return f"expected a mapping of keys{f', such as {own[0]}' if own else ''}"


def _of_unions(problems: list[ErrorDetails]) -> dict[str, list[ErrorDetails]]:
    """Return the problems of union-typed fields, by key. Pydantic reports one problem for each type
    of a union; problems of other fields are not in the result."""
    found: dict[str, list[ErrorDetails]] = {}
    for problem in problems:
        *path, member = problem["loc"]
        if path and MEMBER.fullmatch(str(member)):
            found.setdefault(".".join(str(part) for part in path), []).append(problem)
    return found
