"""The text of `mrl recipe` is a recipe that names every key and changes no default."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from mrl.config import EvalSetConfig, MaskConfig, RewardConfig, SourceConfig
from mrl.config.describe import keys_of_branch, recipe_text
from mrl.config.load import recipe_of
from mrl.config.recipe import Recipe
from mrl.config.suggest import all_keys

FILLED = ["model.path=m", "data.path=d", "rollout.max_response_len=8", "output_dir=run"]
OPTIONAL = {
    "lora": ["lora.rank=4"],
    "environment": ["environment.name=e"],
    "sft": ["sft.path=[p]", "sft.num_steps=1", "sft.batch_size=1", "sft.lr=1"],
}


ELEMENTS = {
    "algorithm.masks": MaskConfig,
    "eval.sets": EvalSetConfig,
    "reward": RewardConfig,
    "data.sources": SourceConfig,
}


def names_of(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of sections and keys."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from names_of(value, f"{prefix}{name}.")


def without_comments(text: str, section: str) -> str:
    """Return the text with the lines of one section that is a comment made keys."""
    lines = text.splitlines()
    start = lines.index(f"# {section}:")
    end = lines.index("", start)
    lines[start:end] = [line.removeprefix("# ") for line in lines[start:end]]
    return "\n".join(lines)


def test_only_what_is_required_is_missing():
    given = recipe_of(yaml.safe_load(recipe_text()), FILLED, "printed")
    minimal = {"model": {}, "train": {}, "rollout": {}, "data": {}}
    assert given == recipe_of(minimal, FILLED, "minimal")
    left_out = re.findall(r"^(?!#)\s*(\w+):$", recipe_text(), re.MULTILINE)
    sections = {key.name for key in keys_of_branch(Recipe) if key.is_section}
    assert set(left_out) - sections == {"path", "max_response_len", "output_dir"}


def test_the_sections_that_may_be_left_out_are_recipes_too():
    for section, overrides in OPTIONAL.items():
        tree = yaml.safe_load(without_comments(recipe_text(), section))
        recipe = recipe_of(tree, [*FILLED, *overrides], section)
        assert getattr(recipe, section) is not None


@pytest.mark.parametrize("key", ELEMENTS)
def test_elements_of_lists_stand_in_comments_as_lists(key):
    name = key.rpartition(".")[2]
    lines = recipe_text().splitlines()
    start = next(i for i, line in enumerate(lines) if f"# An element of {name}, " in line) + 1
    indent = lines[start].partition("#")[0] + "# "
    marks = (f"{indent} ", f"{indent}-")
    block = itertools.takewhile(lambda line: line.startswith(marks), lines[start:])
    (element,) = yaml.safe_load("\n".join(line.removeprefix(indent) for line in block))
    assert list(element) == [each.name for each in keys_of_branch(ELEMENTS[key])]


def test_every_key_has_its_own_line_below_its_comment():
    text = recipe_text()
    for section in OPTIONAL:
        text = without_comments(text, section)
    inside = re.compile(r"^  # mcp:\n(?:  #   .*\n)+", re.MULTILINE)  # in the section `environment`
    text = inside.sub(lambda found: re.sub("^  # ", "  ", found[0], flags=re.MULTILINE), text)
    missing = set(all_keys()) - set(names_of(yaml.safe_load(text)))
    assert all(key.startswith(tuple(f"{name}." for name in ELEMENTS)) for key in missing), missing
    lines = text.splitlines()
    keys = [i for i, line in enumerate(lines) if re.match(r" *\w+: ", line)]
    assert len(keys) > 100
    assert all(lines[i - 1].lstrip().startswith("# ") for i in keys)
