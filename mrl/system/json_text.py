"""Parsing of users' JSON files, and of rows in run files that may be damaged.

`parse_json` refuses objects with duplicate keys. `parse_row` refuses integers with too many digits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mrl.errors import InputError


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; an `object_pairs_hook` for `json.loads`.

    Raises InputError for a duplicate key, because Python would keep its last value and other parsers
    its first.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, times in Counter(n for n, _ in pairs).items() if times > 1)
        raise InputError(f"the key `{twice}` occurs twice in one object; give it once")
    return found


def parse_json(text: str | bytes, where: str) -> Any:
    """Return the value of a JSON text.

    Raises InputError for a duplicate key, with a message that begins with `where`. Raises
    ValueError for invalid JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=each_key_once)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def parse_row(line: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a line.

    Raises ValueError, with a one-line message, if the line is not a JSON object in UTF-8, or has an
    integer of more than MAX_DIGITS digits.
    """
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
"""Maximum number of digits of an integer. mrl's counters have fewer digits. An integer of 310
digits can no longer be converted to a float."""


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number. `true` and `false` are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Kinds = Mapping[str, str]
"""Maps each key of a JSON object to the types that its value may have. The types are names in
KINDS, joined by `|`: `text|null`."""
KINDS = {
    "number": is_number,
    "whole": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
    "list": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def check_kinds(row: Mapping[str, Any], kinds: Kinds, required: tuple[str, ...] = ()) -> None:
    """Raise ValueError if `row` lacks a required key, or if a value has a type that `kinds` does
    not allow for its key.

    Keys that `kinds` does not list may have any value.
    """
    for name in required:
        if name not in row:
            raise ValueError(f"it lacks `{name}`")
    for name, words in kinds.items():
        if name in row and not any(KINDS[word](row[name]) for word in words.split("|")):
            shown = " ".join(repr(row[name]).split())[:40]
            raise ValueError(f"`{name}` is {shown}, expected {words.replace('|', ' or ')}")


def unpaired_surrogate(value: Any) -> str | None:
    """Return the first unpaired surrogate in a JSON value, as an escape; None if there is none.

    An unpaired surrogate is not a character: JSON's escapes can express it, but tokenizers and
    UTF-8 files cannot.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(str(error.object)[error.start]):04x}"
    return None
