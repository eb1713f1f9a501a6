"""Extraction of the answer from a completion, for rewards that compare it with a gold answer."""

from __future__ import annotations

import re

END_OF_TEXT = re.compile(r"<\|(?:endoftext|im_end|eot_id|end)\|>|</s>")
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LEAD = re.compile(r"(?:the\s+)?(?:final\s+)?answer\s*(?:is\s*:?|[:=])\s*", re.IGNORECASE)
"""Matches the text before the answer: `The answer is`, `Final answer:`."""


def without_thinking(completion: str) -> str:
    """Return the completion up to its first end-of-text token, without the thinking.

    All text up to the last `</think>` is removed. The opening tag may be missing, because the prompt
    may already contain it. If thinking was cut off, all text from `<think>` to the end is removed.
    """
    text = END_OF_TEXT.split(completion, maxsplit=1)[0]
    _, closed, rest = text.rpartition("</think>")
    if closed:
        text = rest
    return text.partition("<think>")[0].strip()


def answer_of(completion: str) -> str:
    """Return the content of the completion's last `<answer>` tags, without thinking.

    If the completion has no such tags, all of its text except the thinking is returned.
    """
    text = without_thinking(completion)
    tagged = TAGGED.findall(text)
    return tagged[-1].strip() if tagged else text


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` in `text`.

    The result is None if `text` has no `\boxed{`, or if the brace of the last one is not closed.
    """
    start = text.rfind("\\boxed{")
    depth = 0
    for index in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : index].strip()
    return None


def final_answer(completion: str) -> str:
    r"""Return only the final answer of a completion.

    It is the first of these that exists: the content of the last `\boxed{...}`, the content of the
    last `<answer>` tags, the text after the last `####` (GSM8K), or the last non-empty line. A lead
    such as `The answer is` is removed from that line.
    """
    text = without_thinking(completion)
    marked = boxed(text)
    if marked is None and TAGGED.search(text):
        marked = answer_of(text)
    if marked is None and "####" in text:
        marked = text.rpartition("####")[2].strip()
    if marked is not None:
        return marked
    lines = text.splitlines() or [""]  # the last line is not empty, because the text is stripped
    return LEAD.split(lines[-1])[-1].strip()


def gold_answer(answer: str | float) -> str:
    r"""Return a row's `answer` as a string, without surrounding spaces.

    If `answer` is a solution in which the final answer is marked (`\boxed{...}`, `<answer>` tags or
    `####`), only the final answer is returned. Raises ValueError if `answer` is neither a string
    nor a number.
    """
    if not isinstance(answer, (str, int, float)):
        raise ValueError(f"answer is a {type(answer).__name__}, expected text or a number")
    text = str(answer).strip()
    is_marked = "\\boxed{" in text or "####" in text or TAGGED.search(text)
    return final_answer(text) if is_marked else text
