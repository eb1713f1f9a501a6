"""reasoning-gym's own verifiers, for rows written by `python -m mrl.data.reasoning_gym`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from reasoning_gym.factory import get_score_answer_fn
from reasoning_gym.utils import extract_answer

END_OF_TEXT = re.compile(r"<\|(?:endoftext|im_end|eot_id|end)\|>|</s>")

_verifier: Callable[[str], Any] = functools.cache(get_score_answer_fn)


def answer_of(completion: str) -> str:
    """The completion up to the end token; of that, what `<answer>` tags hold if there are any."""
    text = END_OF_TEXT.split(completion, maxsplit=1)[0]
    tagged = extract_answer(text)
    return tagged if tagged is not None else text.strip()


def reward(
    prompts: list[Any],
    completions: list[str],
    *,
    answer: list[Any],
    info: list[dict[str, Any]],
    **columns: list[Any],
) -> list[float | None]:
    """The verifier's score in [0, 1]; partial credit is the task's."""
    rewards: list[float | None] = []
    for prompt, completion, gold, about in zip(prompts, completions, answer, info, strict=True):
        entry = {"question": prompt, "answer": gold, "metadata": about["metadata"]}
        score = _verifier(about["task"])(answer_of(completion), entry)
        rewards.append(float(score))
    return rewards
