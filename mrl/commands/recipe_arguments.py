"""What every command takes that reads a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from mrl.config import Recipe, load_recipe


def add_recipe(command: argparse.ArgumentParser) -> None:
    """Add the arguments RECIPE and `key=value` (overrides)."""
    command.add_argument(
        "recipe", type=Path, metavar="RECIPE", help="a YAML file, see docs/recipes.md"
    )
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="override a key of the recipe, e.g. optimizer.lr=1e-6",
    )


def read_recipe(args: argparse.Namespace) -> Recipe:
    """Raises InputError."""
    return load_recipe(args.recipe, args.overrides)
