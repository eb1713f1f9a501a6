"""Configuration of the rewards that score the samples."""

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
    """One of several rewards. The reward of a sample is their weighted sum."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """Name of the reward in the metric `rewards/NAME/mean`; empty takes the name of the function or
    file."""
    path: str = ""
    """The reward, written like a single reward in the recipe's key `reward`, for example
    `file.py:func`. Empty takes the file of mrl/rewards/ that `name` names."""
    weight: float = 1.0
    """Weight of the reward in the sum. A reward with weight 0 only appears in the metrics."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        """Fill in a missing `name` from `path`, or a missing `path` from `name`. A string `value` is
        taken as the path. Raises ValueError if name and path are both missing."""
        if isinstance(value, str):
            value = {"path": value}
        if not isinstance(value, dict):
            return value
        if not (value.get("name") or value.get("path")):
            raise ValueError("give a name of mrl/rewards/, or a path such as my/file.py:score")
        name, path = value.get("name"), value.get("path")
        return {**value, "path": path or name, "name": name or _name_of(str(path))}


def _name_of(path: str) -> str:
    """Return a name for the reward `path`: the part after the last colon or slash, without `.py`
    (`func` for `my/file.py:func`). Characters that a name may not have become `_`."""
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
        raise ValueError(f"the name {twice[0]} occurs twice; give each its own `name`")
    return rewards


def _check_text(reward: str) -> str:
    if not reward:
        raise ValueError("the text is empty; give the name of a reward")
    return reward


TAGS = ("reward name", "reward list")
"""Names of the two forms that `Rewards` can have. Pydantic adds the name of the form to the
location of an error."""
Rewards = Annotated[
    Annotated[str, AfterValidator(_check_text), Tag(TAGS[0])]
    | Annotated[tuple[RewardConfig, ...], AfterValidator(_check_names), Tag(TAGS[1])],
    Discriminator(lambda value: TAGS[isinstance(value, (list, tuple))]),
]
"""One reward as a string, or a list of rewards with weights."""


def describe_rewards(rewards: str | tuple[RewardConfig, ...]) -> str:
    """Return one line that identifies the rewards: different rewards give different lines.

    If `rewards` is a single string, the result is that string.
    """
    if isinstance(rewards, str):
        return rewards
    return " + ".join(
        f"{each.weight:.15g} {each.path}" + f" ({each.name})" * (each.name != each.path)
        for each in rewards
    )
