"""Describes every key of a recipe: its type, default and meaning, taken from the classes of this
package.

`mrl recipe` prints the result of `recipe_text`; docs/recipes.md is generated from the same
descriptions.
"""

from __future__ import annotations

import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from mrl.config.branch import Branch
from mrl.config.recipe import Recipe

BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}
COMMENT_WIDTH = 100
HEAD = """\
Every key of a recipe with its default. Fill in the required keys, and set the data (`data.path` or
`data.sources`), the scoring (`reward` or `environment`) and the length of the training
(`train.num_steps` or `train.num_epochs`). Any other key may be changed or left out. Keys in
comments belong to optional sections, and to elements of lists."""


@dataclass(frozen=True)
class Key:
    """The description of one key of the recipe, taken from its field in a `Branch` class."""

    name: str
    type: str
    """The type and its bounds in words: `integer, at least 1`."""
    is_required: bool
    default: Any
    """The default as a YAML value; None if the default is null, or if the key is required."""
    meaning: str
    """The docstring of the field, as one line."""
    branches: tuple[type[Branch], ...]
    """The `Branch` classes (classes for sections of a recipe) that occur in the type of the value,
    for example in a list or as an alternative to null."""
    is_section: bool
    """Whether the key is a section: its value is a mapping of other keys, never a string or a list."""


def keys_of_branch(branch: type[Branch]) -> list[Key]:
    """Return the descriptions of the keys of one `Branch` class, in the order of its fields."""
    return [_key(field.alias or name, field) for name, field in branch.model_fields.items()]


def about_section(key: Key) -> list[str]:
    """Return the docstrings of a section: that of its class and that of its field, each as one
    line. A docstring that does not exist is left out."""
    docs = [inspect.getdoc(branch) if branch.__doc__ else None for branch in key.branches]
    return [" ".join(part.split()) for part in (*docs, key.meaning) if part]


def recipe_text() -> str:
    """Return a recipe as YAML text with every key, its default and a comment that explains it.

    Its first lines say which keys need a value; all other keys may stay as they are.
    """
    lines = [*_comment(HEAD.replace("\n", " ")), ""]
    for key in keys_of_branch(Recipe):
        lines += [*_lines(key), ""]
    return "\n".join(lines)


def _key(name: str, field: FieldInfo) -> Key:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    branches = tuple(_branches(field.annotation))
    return Key(
        name=name,
        type=_type(field),
        is_required=field.is_required(),
        default=_plain(default),
        meaning=" ".join((field.description or "").split()),
        branches=branches,
        is_section=bool(branches) and not _holds(field.annotation, str, tuple),
    )


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _lines(key: Key, *, is_element: bool = False) -> Iterator[str]:
    """Yield the YAML and comment lines that describe one key.

    If the value may be a list of sections, the lines include an example element as a comment. With
    `is_element`, `key` itself belongs to such an element, and the example is left out.
    """
    if key.is_section:
        yield from _section(key)
        return
    kind = f"{key.type}, required" if key.is_required else key.type
    yield from _comment(f"[{kind}] {key.meaning}")
    yield f"{key.name}:" if key.is_required else f"{key.name}: {_yaml(key.default)}"
    if is_element:
        return
    for branch in key.branches:
        yield f"# An element of {key.name}, which is then a list instead of {_yaml(key.default)}:"
        inner = [line for each in keys_of_branch(branch) for line in _lines(each, is_element=True)]
        first = next(i for i, line in enumerate(inner) if not line.startswith("#"))
        yield from (f"# {'-' if i == first else ' '} {line}" for i, line in enumerate(inner))


def _section(key: Key) -> Iterator[str]:
    """Yield the lines of a section, all as comments if the section is optional."""
    is_optional = not key.is_required and key.default is None
    about = [*about_section(key), *(["The whole section may be left out."] if is_optional else [])]
    inner = [
        line for branch in key.branches for each in keys_of_branch(branch) for line in _lines(each)
    ]
    yield from _comment(" ".join(about))
    yield from _prefixed("# " if is_optional else "", [f"{key.name}:", *_prefixed("  ", inner)])


def _prefixed(prefix: str, lines: Iterable[str]) -> list[str]:
    return [f"{prefix}{line}" for line in lines]


def _comment(text: str) -> list[str]:
    width = COMMENT_WIDTH - len("# ")
    return _prefixed(
        "# ", textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    )


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _branches(annotation: Any) -> list[type[Branch]]:
    """Return the `Branch` classes that occur in a field's type, for example in a tuple or as an
    alternative to None."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation] if issubclass(annotation, Branch) else []
    return [branch for part in typing.get_args(annotation) for branch in _branches(part)]


def _holds(annotation: Any, *wanted: type) -> bool:
    """Return whether the type `annotation` is one of the `wanted` types or contains one of them,
    for example as an alternative to None."""
    if annotation in wanted or typing.get_origin(annotation) in wanted:
        return True
    return any(_holds(part, *wanted) for part in typing.get_args(annotation))


def _type(field: FieldInfo) -> str:
    limits = [
        f"{word} {getattr(bound, attribute):g}"
        for bound in field.metadata
        for kind, (attribute, word) in BOUNDS.items()
        if isinstance(bound, kind)
    ]
    return ", ".join([_words(field.annotation), *limits])


def _words(annotation: Any) -> str:
    """Return a type in words: `int | Literal["auto"]` becomes "integer or `auto`". None is left out,
    because the default shows it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in arguments if part is not type(None))
    if origin is typing.Annotated:
        return _words(arguments[0])
    if origin in (tuple, list):
        return f"list of {_words(arguments[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Branch):
        return "mapping (below)"
    names = {str: "string", int: "integer", float: "number", bool: "boolean"}
    return names.get(annotation, str(annotation))
