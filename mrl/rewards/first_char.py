"""The reward of the toy task "repeat the prompt's first character"."""

from __future__ import annotations

from typing import Any


def reward(
    prompts: list[Any],
    completions: list[str],
    *,
    completion_ids: list[list[int]],
    **columns: list[Any],
) -> list[float | None]:
    """Return the share (0 to 1) of the completion's tokens that are the prompt's first character.

    If the prompt is a list of messages, the first character of the last message counts. The
    tokenizer must have one token per character. The divisor is the number of tokens, not the number
    of characters, so that special tokens, which have no text, lower the share.
    """
    rewards: list[float | None] = []
    for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True):
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        rewards.append(min(1.0, completion.count(text[0]) / max(len(ids), 1)))
    return rewards
