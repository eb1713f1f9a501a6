"""The long-tailed toy task of `mrl/data/repeat.py`: a letter, as often as the prompt asks for it."""

from __future__ import annotations

from typing import Any


def reward(
    prompts: list[Any],
    completions: list[str],
    *,
    answer: list[dict[str, Any]],
    completion_ids: list[list[int]],
    **columns: list[Any],
) -> list[float | None]:
    """Right letters / the larger of what was asked for and what was given: 1 for exactly that.

    Too short, too long and wrong letters all cost their share, so short answers are no way out.
    Tokens are counted, not characters: special tokens leave no text.
    """
    rewards: list[float | None] = []
    for completion, wanted, ids in zip(completions, answer, completion_ids, strict=True):
        right = completion.count(wanted["letter"])
        rewards.append(min(1.0, right / max(wanted["times"], len(ids) - 1)))  # less the end token
    return rewards
