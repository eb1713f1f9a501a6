"""The arguments of every command that reads a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mrl.config import Recipe


def add_recipe(command: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add the arguments RECIPE and `key=value`; with `is_optional`, RECIPE may be left out."""
    command.add_argument(
        "recipe",
        nargs="?" if is_optional else None,
        type=Path,
        metavar="RECIPE",
        help="a YAML file, see docs/recipes.md, or the folder of a run, wherever it is now",
    )
    command.add_argument(
        "overrides",
        nargs="*",
        default=[],  # otherwise argparse counts it among the required ones
        metavar="key=value",
        help="override a key of the recipe, e.g. optimizer.lr=1e-6",
    )


def add_allow(command: argparse.ArgumentParser) -> None:
    """Add `--allow KEY ...`."""
    command.add_argument(
        "--allow",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="keys, or sections, that may differ from those of the run that is continued, e.g. "
        "optimizer.lr; docs/checkpoints.md has the table of what may change",
    )


def read_recipe(args: argparse.Namespace) -> Recipe:
    """Return the recipe with its overrides applied. Raises InputError if it is not valid.

    `--allow` also collects `key=value` words that follow its keys. These words are overrides, so
    they are moved from `args.allow` to `args.overrides`.
    """
    from mrl.run.source import read_source

    words = getattr(args, "allow", [])
    args.overrides = [*args.overrides, *(word for word in words if "=" in word)]
    args.allow = [word for word in words if "=" not in word]
    return read_source(args.recipe, args.overrides)
