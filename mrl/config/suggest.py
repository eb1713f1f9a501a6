"""Suggestions for unknown keys of a recipe."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

from mrl.config.foreign import FOREIGN
from mrl.config.recipe import Recipe

MAX_KEYS = 6
"""Maximum number of suggestions in the message about an unknown section. Each suggestion names a
key of that section, and the recipe's key to use instead."""


def suggest(key: str, value: Any = None, known: Sequence[str] = ()) -> str:
    """Return the suggestion that ends the message about the unknown dotted `key`; empty if there is
    none.

    `value` is the key's value in the recipe. If it is a mapping and `key` resembles no section, the
    keys of the mapping are looked up one by one. `known` are the valid keys, by default all
    keys of a recipe.
    """
    if known and key in all_keys():
        return "; it is a key of a tenant's recipe, not of a service"
    known = known or all_keys()
    inner = list(_leaves(value, f"{key}.")) if isinstance(value, dict) else []
    is_near = difflib.get_close_matches(key, [own.partition(".")[0] for own in known], n=1)
    if inner and not is_near and _foreign(key) is None:
        found = [f"{each} is {own}" for each in inner if (own := _find(each, known, is_own=False))]
        if found:
            return f"; here {', '.join(found[:MAX_KEYS])}"
    own = _find(key, known, is_own=True)
    return f"; did you mean {own}?" if own else ""


def _find(key: str, known: Sequence[str], *, is_own: bool) -> str:
    """Return, in quotes, the key of `known` that the user probably means by `key`; empty if no key
    fits. For a key of another framework, a note in parentheses says what differs.

    `key` is compared, in this order, with the exact names of other frameworks, the exact names in
    other sections, the nearest name in the same section, the nearest name anywhere, and the nearest
    name of another framework. `is_own` is true if `key` itself is the unknown key of the message,
    and false if the message is about an unknown section that contains `key`. If it is false, only
    exact names are compared.
    """
    if (foreign := _foreign(key)) is not None and foreign[0] in known:
        return _quoted(*foreign)
    branch, _, leaf = key.rpartition(".")
    leaves = {k: k.rpartition(".")[2] for k in known}
    same = [k for k in known if leaves[k] == leaf]
    if same or not is_own:
        return _quoted(same[0]) if same else ""
    for places in ([k for k in known if k.rpartition(".")[0] == branch], known):
        names = difflib.get_close_matches(leaf, [leaves[k] for k in places], n=1)
        if names:
            return _quoted(next(k for k in places if leaves[k] in names))
    names = difflib.get_close_matches(leaf, FOREIGN, n=1, cutoff=0.8)
    return _quoted(*FOREIGN[names[0]]) if names and FOREIGN[names[0]][0] in known else ""


def _quoted(key: str, note: str = "") -> str:
    return f"{key!r} ({note})" if note else repr(key)


def _foreign(key: str) -> tuple[str, str] | None:
    """Return the entry of FOREIGN for a dotted key; None if there is no entry. If FOREIGN contains
    only the last parts of the key (`rollout.n` of `actor.rollout.n`), the longest match counts."""
    parts = key.replace("-", "_").split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((FOREIGN[end] for end in ends if end in FOREIGN), None)


def _leaves(tree: dict[Any, Any], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict) and value and _foreign(f"{prefix}{name}") is None:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@cache
def all_keys() -> tuple[str, ...]:
    """Return the dotted keys of a recipe. Keys of list elements have no index
    (`data.sources.name`)."""
    return keys_below(Recipe)


def keys_below(branch: type[BaseModel]) -> tuple[str, ...]:
    """Return the dotted keys of a `Branch` class, in the form that `all_keys` returns."""
    return tuple(_keys(branch, ""))


def _keys(branch: type[BaseModel], prefix: str) -> Iterator[str]:
    for attribute, field in branch.model_fields.items():
        name = field.alias or attribute
        yield prefix + name
        inner = field.annotation
        for option in (inner, *getattr(inner, "__args__", ())):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from _keys(option, f"{prefix}{name}.")
