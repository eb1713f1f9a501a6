"""docs/recipes.md, every key of a recipe: `python -m benchmarks.recipe_page`.

The page is made of the classes in mrl/config/: their fields, types, defaults and docstrings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mrl.config import Recipe
from mrl.config.describe import Key, about_section, keys_of_branch

HEADER = ("| key | type | default | meaning |", "|---|---|---|---|")
PAGE = Path(__file__).parents[1] / "docs/recipes.md"
HEAD = """# Recipes

After reading this page you can look up every key of a recipe, with its type, default and meaning.

`python -m benchmarks.recipe_page` writes this page from the classes in `mrl/config/`, and a test
compares the two. `mrl recipe` prints the same keys as a YAML file with comments, to be filled in.
A recipe is one YAML file, and `key=value` on the command line overrides a key:
`mrl train RECIPE optimizer.lr=1e-6`. Unknown keys are refused. A key whose default is *required*
must be given. The default `null` means that the key is not set; the meaning says what happens then.

A relative path in a recipe is looked for in the current directory, then in the folder of the recipe,
then in the folders above it; the first that exists is taken. A path in an override is looked for in
the current directory only, and a relative `output_dir` is always in the current directory. The
`config.yaml` of a run folder has absolute paths, so it means the same wherever a command reads it.
"""


def page() -> str:
    """The whole text of docs/recipes.md."""
    keys = keys_of_branch(Recipe)
    plain = [key for key in keys if not key.is_section]
    parts = [HEAD, "## Keys outside of sections\n", table(plain, "")]
    for key in keys:
        if key.is_section:
            parts += _section(key)
        else:
            parts += _elements(key, key.name)
    return "\n".join(parts)


def _section(key: Key) -> Iterator[str]:
    """The heading and table of one section, and of the elements of lists in it."""
    yield f"## `{key.name}`\n"
    if about := "\n\n".join(about_section(key)):
        yield f"{about}\n"
    if not key.is_required and key.default is None:
        yield "The whole section may be left out.\n"
    for branch in key.branches:
        inner = keys_of_branch(branch)
        yield table(inner, f"{key.name}.")
        for each in inner:
            yield from _elements(each, f"{key.name}.{each.name}")


def _elements(key: Key, name: str) -> Iterator[str]:
    for branch in key.branches:
        yield f"### Elements of `{name}`\n"
        yield table(keys_of_branch(branch), "")


def table(keys: Iterable[Key], prefix: str) -> str:
    return "\n".join([*HEADER, *rows(keys, prefix), ""])


def rows(keys: Iterable[Key], prefix: str) -> list[str]:
    """One row of `HEADER` for each key."""
    return [
        f"| `{prefix}{key.name}` | {key.type} | {_default(key)} | {_cell(key.meaning)} |"
        for key in keys
    ]


def _default(key: Key) -> str:
    if key.is_required:
        return "*required*"
    value: Any = key.default
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    if value == "":
        return '`""`'
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
