"""Scores the toy task, which is to repeat the prompt's first character."""

from __future__ import annotations

from typing import Any


def reward(
    prompts: list[Any],
    completions: list[str],
    *,
    completion_ids: list[list[int]],
    **columns: list[Any],
) -> list[float | None]:
    """Share of the completion's tokens that are the prompt's first character.

    Meant for a tokenizer of one token per character. The divisor counts tokens, not characters:
    special tokens leave no text, and must not make the share larger.
    """
    rewards: list[float | None] = []
    for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True):
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        rewards.append(min(1.0, completion.count(text[0]) / max(len(ids), 1)))
    return rewards
