"""Reads JSON of users' files, and rows of run files that may be damaged.

A duplicate key in an object is refused, and so is a number that is too large for a float.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mrl.errors import InputError


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; for the argument `object_pairs_hook` of `json.loads`.

    Raises InputError where a key is there twice: Python keeps the last one, other readers the first.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"the key `{twice}` is there twice in one object; give it once")
    return found


def parse_json(text: str | bytes, where: str) -> Any:
    """Return what `text` holds. Raises InputError that begins with `where` for a key that is there
    twice, and ValueError for what is no JSON."""
    try:
        return json.loads(text, object_pairs_hook=each_key_once)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def parse_row(line: str | bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises ValueError for anything else, in one line."""
    try:
        row = json.loads(line, parse_int=_bounded)
    except json.JSONDecodeError:
        raise ValueError("it is not JSON") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    return row


def _bounded(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


MAX_DIGITS = 30
"""The most digits of a whole number: counters of mrl have fewer, and a float overflows at 310."""


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number, and not `true` or `false`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Kinds = Mapping[str, str]
"""The types of an object's values, by key: words of KINDS, joined by `|`."""
KINDS = {
    "number": is_number,
    "whole": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
    "list": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def check_kinds(row: Mapping[str, Any], kinds: Kinds, required: tuple[str, ...] = ()) -> None:
    """Raise ValueError if a value of `row` does not have the type that `kinds` gives for its key, or a
    required key is missing. Keys that are not in `kinds` may hold anything."""
    for name in required:
        if name not in row:
            raise ValueError(f"it lacks `{name}`")
    for name, words in kinds.items():
        if name in row and not any(KINDS[word](row[name]) for word in words.split("|")):
            shown = " ".join(repr(row[name]).split())[:40]
            raise ValueError(f"`{name}` is {shown}, expected {words.replace('|', ' or ')}")


def unpaired_surrogate(value: Any) -> str | None:
    """Return the first unpaired surrogate in a JSON value; None if there is none.

    It is not a character: tokenizers and UTF-8 files cannot hold it, but JSON's escapes can.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(str(error.object)[error.start]):04x}"
    return None
