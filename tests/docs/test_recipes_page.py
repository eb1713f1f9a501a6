"""docs/recipes.md is what benchmarks/recipe_page.py writes."""

from __future__ import annotations

from benchmarks.recipe_page import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m benchmarks.recipe_page"
