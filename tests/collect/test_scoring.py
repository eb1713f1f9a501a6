"""The worker processes of a run's rewards."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mrl.collect.scoring import Scoring
from mrl.errors import InputError, RunFailed
from tests.sample_groups import group


def recipe_with(rewards: dict[str, str]) -> Any:
    """A recipe with a reward of its own beside those of sources of its data."""
    return SimpleNamespace(
        rollout=SimpleNamespace(prompts_per_step=1, samples_per_prompt=1),
        environment=None,
        reward="first_char",
        reward_timeout_s=10.0,
        data=SimpleNamespace(rewards=rewards),
    )


def test_a_reward_that_cannot_be_loaded_leaves_no_worker_of_the_others() -> None:
    recipe = recipe_with({"a": "nobody"})
    before = set(psutil.Process().children())
    with pytest.raises(InputError, match="nobody"):
        Scoring(recipe, None)
    assert set(psutil.Process().children()) <= before


def test_a_prompt_whose_own_reward_is_unknown_is_not_scored_by_another_one() -> None:
    """A prompt that waited in a checkpoint, say, whose reward file was moved since."""
    other = group([0.0])
    other.prompt = dataclasses.replace(other.prompt, reward="old/r.py:f")
    scoring = Scoring(recipe_with({}), None)
    try:
        for score in (scoring.begin, scoring.score):
            with pytest.raises(
                RunFailed, match=r"prompts:0: the prompt has the reward old/r\.py:f, but"
            ):
                score(other)
    finally:
        scoring.close()
