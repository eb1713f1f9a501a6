"""The keys of a service in docs/tenants.md: `python -m benchmarks.service_table`.

The table is made of the classes in mrl/config/service.py.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.recipe_page import HEADER, rows
from mrl.config import ServiceConfig
from mrl.config.describe import keys_of_branch

PAGE = Path(__file__).parents[1] / "docs/tenants.md"
BEGIN, END = "<!-- table: python -m benchmarks.service_table -->\n", "<!-- end of table -->\n"
AS_IN_RECIPES = ("model", "parallel", "megatron", "rollout", "async", "watch")
"""Sections whose keys docs/recipes.md explains."""


def page(text: str) -> str:
    """Return the page `text` with the table of the code."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE}: the marks of the table are missing"
    return before + BEGIN + table() + END + after


def table() -> str:
    """The keys of the sections that are a service's own, and the names of those of the others."""
    keys = keys_of_branch(ServiceConfig)
    lines = ["", *HEADER]
    for key in keys:
        if key.name in AS_IN_RECIPES:
            continue
        inner = [each for branch in key.branches for each in keys_of_branch(branch)]
        lines += rows(inner, f"{key.name}.") if inner else rows([key], "")
    lines += ["", "These sections hold keys of a recipe:", ""]
    for key in keys:
        if key.name in AS_IN_RECIPES:
            inner = [each.name for branch in key.branches for each in keys_of_branch(branch)]
            names = ", ".join(f"`{name}`" for name in inner) or "fields of Megatron"
            place = f"recipes.md#{key.name}" if inner else "megatron.md"
            lines.append(f"- [`{key.name}`]({place}): {names}")
    return "\n".join([*lines, "", ""])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote the table of {PAGE}")
