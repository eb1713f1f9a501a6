"""A reward from reasoning-gym's own verifiers, for rows written by `python -m
mrl.data.reasoning_gym`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mrl.errors import InputError
from mrl.rewards.answers import answer_of

try:
    from reasoning_gym.factory import get_score_answer_fn
except ModuleNotFoundError as error:
    if error.name != "reasoning_gym":
        raise  # one of its dependencies is missing
    raise InputError("reasoning-gym is not installed; pip install 'mrl[tasks]'") from None

_verifier: Callable[[str], Any] = functools.cache(get_score_answer_fn)


def reward(
    prompts: list[Any],
    completions: list[str],
    *,
    answer: list[Any],
    info: list[dict[str, Any]],
    **columns: list[Any],
) -> list[float | None]:
    """Return one score in [0, 1] per completion, from the verifier of the row's task. Scores
    between 0 and 1 are partial credit."""
    rewards: list[float | None] = []
    for prompt, completion, gold, about in zip(prompts, completions, answer, info, strict=True):
        entry = {"question": prompt, "answer": gold, "metadata": about["metadata"]}
        score = _verifier(about["task"])(answer_of(completion), entry)
        rewards.append(float(score))
    return rewards
