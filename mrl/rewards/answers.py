"""Finds the answer in a completion, for the rewards that compare it with a gold one."""

from __future__ import annotations

import re

END_OF_TEXT = re.compile(r"<\|(?:endoftext|im_end|eot_id|end)\|>|</s>")
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LEAD = re.compile(r"(?:the\s+)?(?:final\s+)?answer\s*(?:is\s*:?|[:=])\s*", re.IGNORECASE)
"""`The answer is`, `Final answer:` before the answer itself."""


def spoken(completion: str) -> str:
    """Return the completion up to the end token, without the text between `<think>` tags.

    Thoughts that the end of the context cut off leave nothing. Where the prompt opened the tag, only
    the closing one is there to see: what follows the last is kept.
    """
    text = END_OF_TEXT.split(completion, maxsplit=1)[0]
    _, closed, rest = text.rpartition("</think>")
    if closed:
        text = rest
    return text.partition("<think>")[0].strip()


def answer_of(completion: str) -> str:
    """Return what was said, or what its last `<answer>` tags hold if there are any."""
    text = spoken(completion)
    tagged = TAGGED.findall(text)
    return tagged[-1].strip() if tagged else text


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds; None where there is none or its brace stays open."""
    start = text.rfind("\\boxed{")
    depth = 0
    for index in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : index].strip()
    return None


def final_answer(completion: str) -> str:
    r"""The answer alone: the first of these that is there.

    The last `\boxed{...}`, the last `<answer>` tags, what follows the last `####` (GSM8K), the last
    line that is not empty; that less `The answer is`.
    """
    text = spoken(completion)
    marked = boxed(text)
    if marked is None and TAGGED.search(text):
        marked = answer_of(text)
    if marked is None and "####" in text:
        marked = text.rpartition("####")[2].strip()
    if marked is not None:
        return marked
    lines = text.splitlines() or [""]  # the last is not empty: spoken() strips
    return LEAD.split(lines[-1])[-1].strip()


def gold_answer(answer: str | float) -> str:
    """Return a row's `answer`, or what it marks where it is a whole solution. Raises ValueError on
    other types."""
    if not isinstance(answer, (str, int, float)):
        raise ValueError(f"answer is a {type(answer).__name__}, expected text or a number")
    text = str(answer).strip()
    is_marked = "\\boxed{" in text or "####" in text or TAGGED.search(text)
    return final_answer(text) if is_marked else text
