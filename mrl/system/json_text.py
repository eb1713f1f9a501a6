"""Reads JSON of other people's files, and refuses a key that stands twice in one object."""

from __future__ import annotations

import json
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
