"""Load a recipe from a path, a dict or another recipe, with overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mrl.config import Recipe
from mrl.config.load import recipe_of
from mrl.errors import InputError
from mrl.run.source import read_source

Overrides = Mapping[str, Any] | Sequence[str]
"""Overrides of keys: either a mapping `{"optimizer.lr": 1e-6}`, or a list `["optimizer.lr=1e-6"]`
as on the command line."""


def load_recipe(
    recipe: Recipe | str | Path | Mapping[str, Any], overrides: Overrides | None = None
) -> Recipe:
    """Return a complete recipe from a YAML file, the folder of a run, a dict, or another recipe.

    A dict may be nested like the YAML: `{"optimizer": {"lr": 1e-6}}`. The keys of `overrides` are
    dotted. Missing keys get their defaults, and relative paths that exist become absolute. Raises
    InputError if the recipe is not valid; the message is one line and names the key.
    """
    items = [] if overrides is None else _items(overrides)
    if isinstance(recipe, (str, Path)):
        return read_source(Path(recipe), items)
    if isinstance(recipe, Recipe):
        return recipe_of(recipe.model_dump(mode="json"), items, "recipe")
    if isinstance(recipe, Mapping):
        return recipe_of(_plain(recipe), items, "recipe")
    raise InputError(
        f"recipe: got {type(recipe).__name__}, expected the path of a YAML file, a dict or an "
        "mrl.Recipe"
    )


def _items(overrides: Overrides) -> list[str]:
    """Return the overrides as `key=value` strings, as on the command line. Raises InputError if
    `overrides` is a single string, or if YAML cannot express a value."""
    if isinstance(overrides, str):
        raise InputError(f"overrides: got {overrides!r}, expected a list such as [{overrides!r}]")
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{key}={_yaml(key, value)}" for key, value in overrides.items()]


def _yaml(key: str, value: Any) -> str:
    try:
        text = yaml.safe_dump(_plain(value), default_flow_style=True, width=10**9)
    except yaml.YAMLError:
        hint = (
            "; write the name of a function or class as text: file.py:NAME"
            if callable(value)
            else ""
        )
        raise InputError(
            f"override {key}: got {type(value).__name__}, expected a value of YAML: a number, a "
            f"string, true or false, null, a list or a dict{hint}"
        ) from None
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    """Return the value with mappings, tuples and paths converted to dicts, lists and strings."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
