"""Reads a recipe and its overrides, and writes the resolved one. Every error is one line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from mrl.config.paths import hold_paths
from mrl.config.recipe import Recipe
from mrl.config.reward import TAGS
from mrl.config.suggest import suggest
from mrl.errors import InputError
from mrl.system.files import write_whole

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

RENAMED = {
    "warm_start": "sft",
    "rollout.unfinished": "rollout.partial_rollouts",
}
"""Keys of earlier recipes and their names now. A recipe that has an old one is refused."""
MEMBER = re.compile(r"int|float|constrained-(int|float)|literal\[.*\]")
"""The last part of the location of a problem where pydantic tried one type of a union."""


def load_recipe(
    path: str | Path,
    overrides: list[str] | None = None,
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> Recipe:
    """Read a recipe and apply `dotted.key=value` overrides (values are YAML).

    Relative paths become absolute, see mrl/config/paths.py; `prepare` may change what was read before
    the overrides are applied. Raises InputError that names the key, what was given, what was expected
    and the nearest key.
    """
    tree = hold_paths(_read_yaml(Path(path)), Path(path))
    if prepare is not None:
        prepare(tree)
    return recipe_of(tree, overrides, str(path))


def recipe_of(tree: dict[str, Any], overrides: list[str] | None, source: str) -> Recipe:
    """Make a recipe of the keys in `tree`, which it changes, and of overrides.

    `source` is what messages call it. Raises InputError as `load_recipe` does.
    """
    _refuse_renamed(_keys_of(tree), source)
    for item in overrides or []:
        _refuse_renamed([item.partition("=")[0]], f"override {item!r}")
        _apply_override(tree, item)
        _spread_short_forms(tree)
    # An override may also give a whole branch: rollout={unfinished: resume}.
    _refuse_renamed(_keys_of(tree), "overrides")
    try:
        return Recipe.model_validate(hold_paths(tree, None))
    except ValidationError as error:
        raise InputError(f"{source}: {_explain(error)}") from None


def dump_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe, every default spelled out, so that it can be loaded again.

    Its paths are absolute, `output_dir` too, so that the file means the same in any directory.
    """
    tree = hold_paths(recipe.model_dump(mode="json"), None)
    tree["output_dir"] = os.path.abspath(recipe.output_dir)
    # Whole, as other ranks may be reading the file.
    write_whole(path, yaml.safe_dump(tree, sort_keys=False))


def _refuse_renamed(keys: Iterable[str], source: str) -> None:
    """Raise InputError, naming every new key, where any of the dotted `keys` has an old name."""
    found: dict[str, str] = {}
    for key in keys:
        for old, new in RENAMED.items():
            if key == old or key.startswith(f"{old}."):
                found.setdefault(old, f"{old} was renamed: write {new}{key[len(old) :]}")
    if found:
        raise InputError(f"{source}: {'; '.join(found.values())}")


def _keys_of(tree: dict[Any, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys_of(value, f"{prefix}{name}.")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InputError(f"recipe {path}: {error.strerror}; give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = " ".join(str(error).split())
        raise InputError(f"recipe {path} is not valid YAML: {first}") from None
    if not isinstance(tree, dict):
        raise InputError(f"recipe {path}: expected a mapping of keys, got {type(tree).__name__}")
    _spread_short_forms(tree)
    return tree


def _spread_short_forms(tree: dict[str, Any]) -> None:
    """Make `logging: [NAME, ...]` a branch, so that overrides can change its other keys."""
    if isinstance(tree.get("logging"), list):
        tree["logging"] = {"trackers": tree["logging"]}


def _apply_override(tree: dict[str, Any], item: str) -> None:
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise InputError(f"override {item!r}: expected key=value, e.g. optimizer.lr=1e-6")
    *parents, leaf = key.split(".")
    for depth, name in enumerate(parents):
        child = tree.setdefault(name, {})
        if child is None:
            child = tree[name] = {}
        if not isinstance(child, dict):
            raise InputError(
                f"override {item!r}: {'.'.join(parents[: depth + 1])} is a value, not a branch"
            )
        tree = child
    try:
        tree[leaf] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"override {item!r}: {value!r} is not a YAML value") from None


def _explain(error: ValidationError) -> str:
    lines = []
    problems = error.errors()
    for key, members in _of_unions(problems).items():
        messages = ", or: ".join(member["msg"] for member in members)
        lines.append(f"{key}: {messages}, got {members[0]['input']!r}")
        problems = [problem for problem in problems if problem not in members]
    for problem in problems:
        place = [part for part in problem["loc"] if part not in TAGS]
        key = ".".join(map(str, place))
        if problem["type"] == "extra_forbidden":
            named = ".".join(part for part in place if isinstance(part, str))
            lines.append(f"unknown key {key!r}{suggest(named, problem['input'])}")
        elif problem["type"] == "missing":
            lines.append(f"{key}: required, and not given")
        else:
            lines.append(f"{key}: {problem['msg']}, got {problem['input']!r}")
    return "; ".join(lines)


def _of_unions(problems: list[ErrorDetails]) -> dict[str, list[ErrorDetails]]:
    """Return the problems of fields of a union type by key: pydantic reports one for each type."""
    found: dict[str, list[ErrorDetails]] = {}
    for problem in problems:
        *path, member = problem["loc"]
        if path and MEMBER.fullmatch(str(member)):
            found.setdefault(".".join(str(part) for part in path), []).append(problem)
    return found
