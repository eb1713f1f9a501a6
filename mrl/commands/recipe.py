"""`mrl recipe` prints a recipe that has every key."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "recipe",
        help="print every key of a recipe with its default and meaning",
        description="Print a recipe in YAML that has every key, with its default and its meaning in a "
        "comment. Write it to a file (mrl recipe > my.yaml), fill in the keys that its first lines ask "
        "for, and mrl check accepts it.",
    )
    command.set_defaults(run=run)


def run(_args: argparse.Namespace) -> None:
    from mrl.config.describe import recipe_text

    print(recipe_text(), end="")
