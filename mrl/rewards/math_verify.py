r"""A reward of 1 if the final answer equals the row's answer mathematically, else 0.

The package math-verify parses LaTeX and plain expressions with sympy and compares them:
`\frac{1}{2}`, `0.5` and `1/2` are equal, and so are `50\%` and `50`. The package looks first for
`\boxed{...}`, then for `The answer is ...`, then for the last mathematical expression. It cannot
judge answers in words: it parses a word as a product of symbols, so words with the same letters are
equal.

sympy may compute forever (`9^{9^{9^9}}`). math-verify's own time limits are off. They use signals,
which work only in a main thread, and they would score a slow expression as wrong. Instead the
worker process is killed after a time limit (`reward_timeout_s`), and the sample is masked. The
worker parses one expression when it starts, so that the imports of the first parse do not count
against that limit.
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
"""Maximum number of characters of a completion that are parsed. There is a maximum because parsing
time grows faster than the length of the text."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def reward(
    prompts: list[Any],
    completions: list[str],
    *,
    answer: list[Any],
    **columns: list[Any],
) -> list[float | None]:
    """Return 1.0 if the completion's answer equals the row's answer, else 0.0; None if the row's answer
    cannot be parsed."""
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
    r"""Return the part of a text that is parsed, of at most MAX_ANSWER_CHARS characters.

    A short text is returned completely. From a longer text, the end is returned, starting at a line
    or a word if possible. If a `\boxed` occurs in the text but not in this end, the part that
    begins with the last `\boxed` is returned.
    """
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    part = text[-MAX_ANSWER_CHARS:]
    if "\\boxed" not in part and "\\boxed" in text:
        return text[text.rfind("\\boxed") :][:MAX_ANSWER_CHARS]
    # Start at a line or a word: half a formula would flip every later `$`, and half a number is wrong.
    for separator in ("\n", " "):
        if separator in part:
            return part.partition(separator)[2]
    return part


def _parse(text: str) -> list[Any]:
    return parse(text, extraction_config=_EXTRACTION, parsing_timeout=None)  # pyright: ignore


@functools.lru_cache(maxsize=1024)
def _gold(answer: str) -> list[Any]:
    """Return the expressions parsed from the gold answer; empty if it contains no mathematics."""
    return _parse(f"\\boxed{{{answer}}}") or _parse(answer)
