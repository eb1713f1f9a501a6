"""The worker processes of a run's rewards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mrl.collect.scoring import Scoring
from mrl.errors import InputError


def test_a_reward_that_cannot_be_loaded_leaves_no_worker_of_the_others() -> None:
    recipe: Any = SimpleNamespace(
        rollout=SimpleNamespace(prompts_per_step=1, samples_per_prompt=1),
        environment=None,
        reward="first_char",
        reward_timeout_s=10.0,
        data=SimpleNamespace(rewards={"a": "nobody"}),
    )
    before = set(psutil.Process().children())
    with pytest.raises(InputError, match="nobody"):
        Scoring(recipe, None)
    assert set(psutil.Process().children()) <= before
