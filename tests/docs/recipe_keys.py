"""Whether a dotted name is a key of the recipe, or of the configuration of a service."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from mrl.config import Recipe, ServiceConfig
from mrl.config.branch import Branch

SECTIONS = frozenset(Recipe.model_fields)


def _branches(annotation: Any) -> list[type[Branch]]:
    """The branches that a field may hold, alone, in a list or beside None."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation] if issubclass(annotation, Branch) else []
    return [branch for part in typing.get_args(annotation) for branch in _branches(part)]


def _is_free(annotation: Any) -> bool:
    """Whether a field takes any keys, as `megatron` does."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(map(_is_free, typing.get_args(annotation)))
    return annotation is Any or typing.get_origin(annotation) is dict


def is_key(dotted: str) -> bool:
    """Whether a recipe or a service has the key `train.num_steps`, say; `*` stands for any key."""
    return _is_key(dotted, Recipe) or _is_key(dotted, ServiceConfig)


def _is_key(dotted: str, branch: type[Branch]) -> bool:
    name, _, rest = dotted.partition(".")
    if name == "*":
        return True
    if name not in branch.model_fields:
        return False
    annotation = branch.model_fields[name].annotation
    return (
        not rest
        or _is_free(annotation)
        or any(_is_key(rest, inner) for inner in _branches(annotation))
    )


def keys_of(value: Any, prefix: str = "") -> list[str]:
    """The dotted names of the leaves of a YAML document; the elements of lists share one name."""
    if isinstance(value, list):
        return [key for element in value for key in keys_of(element, prefix)]
    if isinstance(value, Mapping):
        return [k for name, v in value.items() for k in keys_of(v, f"{prefix}.{name}".strip("."))]
    return [prefix]
