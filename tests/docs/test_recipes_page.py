"""docs/recipes.md and the tables of docs/checkpoints.md and docs/tenants.md are what their scripts in
benchmarks/ write."""

from __future__ import annotations

from benchmarks import changes_table, service_table
from benchmarks.recipe_page import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m benchmarks.recipe_page"


def test_the_table_of_what_may_change_is_that_of_the_code() -> None:
    text = changes_table.PAGE.read_text()
    assert text == changes_table.page(text), "run: python -m benchmarks.changes_table"


def test_the_table_of_a_service_is_that_of_the_code() -> None:
    text = service_table.PAGE.read_text()
    assert text == service_table.page(text), "run: python -m benchmarks.service_table"
