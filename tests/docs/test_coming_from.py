"""docs/coming_from.md: its keys are those of the recipe, and the messages lead to the same ones."""

from __future__ import annotations

import re

import pytest

from mrl import client
from mrl.config.suggest import all_keys, suggest
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/coming_from.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| `", line)
]
RECIPES = [row for row in ROWS if not row[1].startswith(("`Se", "`Fu"))]
CALLS = [row for row in ROWS if row not in RECIPES]


def test_the_page_has_tables_of_all_four() -> None:
    heads = re.findall(r"^\| (TRL|verl|slime|Tinker|cookbook) \| mrl \|", PAGE, re.MULTILINE)
    assert heads == ["TRL", "verl", "slime", "Tinker", "cookbook"]
    assert len(RECIPES) > 140


@pytest.mark.parametrize("row", RECIPES, ids=[row[0] for row in RECIPES])
def test_a_row_names_keys_and_the_messages_agree(row: list[str]) -> None:
    theirs, ours = (re.findall(r"`([^`]+)`", cell) for cell in row[:2])
    assert set(ours) <= set(all_keys())
    for name in theirs:
        plain = name.removeprefix("--").replace("-", "_")
        said = re.match(r"; did you mean '([^']+)'", suggest(plain))
        found = plain if plain in all_keys() else said and said[1]
        assert found in ours, f"{name} leads to {found}"


@pytest.mark.parametrize("row", CALLS, ids=[row[0] for row in CALLS])
def test_a_call_of_tinker_has_its_call_here(row: list[str]) -> None:
    name = row[1].strip("`").partition("(")[0]
    owner, _, method = name.partition(".")
    assert hasattr(client, owner)
    assert not method or hasattr(getattr(client, owner), method)
