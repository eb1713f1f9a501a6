"""Configures what scores the samples."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from mrl.config.branch import Branch

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


class RewardConfig(Branch):
    """One of several rewards: the reward of a sample is their weighted sum."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """Its name in `rewards/NAME/mean`; empty takes that of the function or file."""
    path: str = ""
    """What scores, as `reward` names it where it is a string; empty takes the file of mrl/rewards/ that
    is called `name`."""
    weight: float = 1.0
    """What it counts in the sum; 0 reports it only."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        """Fill `name` and `path` from each other; a string alone is a path."""
        if isinstance(value, str):
            value = {"path": value}
        if not isinstance(value, dict):
            return value
        if not (value.get("name") or value.get("path")):
            raise ValueError("give a name of mrl/rewards/, or a path such as my/file.py:score")
        name, path = value.get("name"), value.get("path")
        return {**value, "path": path or name, "name": name or _name_of(str(path))}


def _name_of(path: str) -> str:
    """Return the function's name of `file.py:func`, the file's of `file.py`, else the path."""
    file, _, function = path.rpartition(":")
    short = function if file.endswith(".py") or "/" not in function else path
    short = short.rstrip("/").rpartition("/")[2].removesuffix(".py") or path
    return _NOT_IN_NAMES.sub("_", short).strip("_") or "reward"


def _check_names(rewards: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
    names = [each.name for each in rewards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names:
        raise ValueError("the list is empty; give at least one reward")
    if twice:
        raise ValueError(f"the name {twice[0]} stands twice; give each a `name` of its own")
    return rewards


TAGS = ("reward name", "reward list")
"""What pydantic adds to the location of a problem in a `Rewards`."""
Rewards = Annotated[
    Annotated[str, Tag(TAGS[0])]
    | Annotated[tuple[RewardConfig, ...], AfterValidator(_check_names), Tag(TAGS[1])],
    Discriminator(lambda value: TAGS[isinstance(value, (list, tuple))]),
]
"""One reward by its name, or several with weights."""


def describe_rewards(rewards: str | tuple[RewardConfig, ...]) -> str:
    """Return rewards in one line, which differs from that of any other rewards.

    A single reward by its name is that name.
    """
    if isinstance(rewards, str):
        return rewards
    return " + ".join(
        f"{each.weight:.15g} {each.path}" + f" ({each.name})" * (each.name != each.path)
        for each in rewards
    )
