r"""Compares the final answer mathematically, by the package math-verify: 1 or 0.

It reads LaTeX and plain expressions into sympy and compares them: `\frac{1}{2}`, `0.5` and `1/2` are
equal, so are `50\%` and `50`. `\boxed{...}` comes first, then `The answer is ...`, then whatever
mathematics comes last. It is no judge of words: letters are read as a product of symbols, in any order.

sympy may compute for ever (`9^{9^{9^9}}`). math-verify's own time limits are signals, which work in a
main thread only and count an expression that was too slow as a wrong one. They are off: the limit is
the worker's (`reward_timeout_s`), which is killed, and the one sample masked. What the first parse of a
process loads is no part of that limit: it is done when the worker starts.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from mrl.errors import InputError
from mrl.rewards.answers import answer_of, gold_answer

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError:
    raise InputError("math-verify is not installed; pip install 'mrl[tasks]'") from None

MAX_ANSWER_CHARS = 1000
"""The end of the completion that is read: time grows faster than its length, and policies do babble."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def reward(
    prompts: list[Any],
    completions: list[str],
    *,
    answer: list[Any],
    **columns: list[Any],
) -> list[float | None]:
    """1.0 where the completion's answer equals the row's; None where the row's is unreadable."""
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        expected = [] if gold is None else _gold(gold_answer(gold))
        if not expected:
            rewards.append(None)
            continue
        given = _parse(last_part(answer_of(completion)))
        rewards.append(float(verify(expected, given, timeout_seconds=None)))
    return rewards


def _start_worker() -> None:
    reward(["p"], [r"\boxed{\frac{x^2}{2}}"], answer=["x + 1"])


reward.start_worker = _start_worker  # pyright: ignore[reportFunctionMemberAccess]


def last_part(text: str) -> str:
    r"""Return at most MAX_ANSWER_CHARS that hold the last `\boxed`, or are the end of the text."""
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    part = text[-MAX_ANSWER_CHARS:]
    if "\\boxed" not in part and "\\boxed" in text:
        return text[text.rfind("\\boxed") :][:MAX_ANSWER_CHARS]
    # From a new line or word: half a formula would turn every `$` behind it around, half a number lie.
    for separator in ("\n", " "):
        if separator in part:
            return part.partition(separator)[2]
    return part


def _parse(text: str) -> list[Any]:
    return parse(text, extraction_config=_EXTRACTION, parsing_timeout=None)  # pyright: ignore


@functools.lru_cache(maxsize=1024)
def _gold(answer: str) -> list[Any]:
    """Empty where there is no mathematics in it."""
    return _parse(f"\\boxed{{{answer}}}") or _parse(answer)
