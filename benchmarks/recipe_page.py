"""docs/recipes.md, every key of a recipe: `python -m benchmarks.recipe_page`.

The page is made of the classes in mrl/config/: their fields, types, defaults and docstrings.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from mrl.config import Recipe
from mrl.config.branch import Branch

PAGE = Path(__file__).parents[1] / "docs/recipes.md"
BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}
HEAD = """# Recipes

After reading this page you can look up every key of a recipe, with its type, default and meaning.

`python -m benchmarks.recipe_page` writes this page from the classes in `mrl/config/`, and a test
compares the two. A recipe is one YAML file, and `key=value` on the command line overrides a key:
`mrl train RECIPE optimizer.lr=1e-6`. Unknown keys are refused. A key whose default is *required*
must be given. The default `null` means that the key is not set; the meaning says what happens then.

A relative path in a recipe is looked for in the current directory, then in the folder of the recipe,
then in the folders above it; the first that exists is taken. A path in an override is looked for in
the current directory only, and a relative `output_dir` is always in the current directory. The
`config.yaml` of a run folder has absolute paths, so it means the same wherever a command reads it.
"""


def page() -> str:
    """The whole text of docs/recipes.md."""
    fields = Recipe.model_fields.items()
    plain = {n: f for n, f in fields if _is_text(f.annotation) or not _branches(f.annotation)}
    parts = [HEAD, "## Keys outside of sections\n", _table(plain, "")]
    for name, field in Recipe.model_fields.items():
        for branch in _branches(field.annotation):
            if name in plain:
                parts += [f"### Elements of `{name}`\n", _table(branch.model_fields, "")]
            else:
                parts += _section(name, field, branch)
    return "\n".join(parts)


def _section(name: str, field: FieldInfo, branch: type[Branch]) -> Iterator[str]:
    """The heading and table of one branch, and of the branches in it."""
    yield f"## `{name}`\n"
    about = [inspect.getdoc(branch) if branch.__doc__ else None, field.description]
    text = "\n\n".join(" ".join(part.split()) for part in about if part)
    if text:
        yield f"{text}\n"
    if not field.is_required() and field.default is None:
        yield "The whole section may be left out.\n"
    yield _table(branch.model_fields, f"{name}.")
    for inner_name, inner in branch.model_fields.items():
        for inner_branch in _branches(inner.annotation):
            yield f"### Elements of `{name}.{inner_name}`\n"
            yield _table(inner_branch.model_fields, "")


def _table(fields: dict[str, FieldInfo], prefix: str) -> str:
    rows = [
        f"| `{prefix}{name}` | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |"
        for name, field in fields.items()
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _branches(annotation: Any) -> list[type[Branch]]:
    """The branches that a field may hold, alone, in a tuple or beside None."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation] if issubclass(annotation, Branch) else []
    return [branch for part in typing.get_args(annotation) for branch in _branches(part)]


def _is_text(annotation: Any) -> bool:
    """Whether a field may be a string, beside the branches that it may hold."""
    return annotation is str or any(map(_is_text, typing.get_args(annotation)))


def _type(field: FieldInfo) -> str:
    limits = [
        f"{word} {getattr(bound, attribute):g}"
        for bound in field.metadata
        for kind, (attribute, word) in BOUNDS.items()
        if isinstance(bound, kind)
    ]
    return ", ".join([_words(field.annotation), *limits])


def _words(annotation: Any) -> str:
    """A type in words: `integer or "auto"`; that a key may be null is left to its default."""
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


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    if value == "":
        return '`""`'
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
