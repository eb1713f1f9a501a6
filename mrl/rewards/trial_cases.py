"""The cases that `mrl reward test` scores: rows of a file, each with one or more completions.

Dimensions: G completions of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrl.errors import InputError

SPELLINGS: tuple[tuple[str, str], ...] = (
    ("plain", "{}"),
    ("boxed", "\\boxed{{{}}}"),
    ("tagged", "<answer>{}</answer>"),
)
"""Ways to write the gold answer, as (name, format string). A reward need not understand all of them."""
RESERVED = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class Case:
    """One row with its G completions."""

    source: str
    """Where the row comes from, as `file:line`."""
    prompt: Any
    texts: tuple[str, ...]
    """The completions in the row's column `completion`. If the row has no such column, the texts
    are the gold answer (if there is one) in each of SPELLINGS, followed by wrong answers."""
    num_gold: int
    """How many of the `texts` are spellings of the gold answer. They come first."""
    columns: dict[str, Any]

    def request(
        self, encode: Callable[[str], list[int]], only: int | None = None
    ) -> dict[str, Any]:
        """Return the reward request for all `texts`, or only for the text with the index `only`.

        `encode` returns the token ids of a text.
        """
        texts = list(self.texts) if only is None else [self.texts[only]]
        columns: dict[str, Any] = {key: [value] * len(texts) for key, value in self.columns.items()}
        columns["completion_ids"] = [encode(text) for text in texts]
        return {"prompts": [self.prompt] * len(texts), "completions": texts, "columns": columns}


def make_cases(rows: list[tuple[str, dict[str, Any]]]) -> list[Case]:
    """Make one case per row. A row is given as (`file:line`, columns).

    Raises InputError if a row has no valid prompt, an invalid `completion`, or a reserved column
    name.
    """
    answers = [_text(row.get("answer")) for _, row in rows]
    return [_case(source, row, answers) for source, row in rows]


def _case(source: str, row: dict[str, Any], answers: list[str]) -> Case:
    prompt = row.get("prompt")
    if not isinstance(prompt, (str, list)) or not prompt:
        raise InputError(f"{source}: `prompt` must be a string or a list of messages")
    for name in RESERVED:
        if name in row:
            raise InputError(
                f"{source}: column {name!r} is the name of an argument of the reward call; rename it"
            )
    columns = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
    if "completion" in row:
        given = row["completion"]
        texts = tuple(given) if isinstance(given, list) else (given,)
        if not texts or any(not isinstance(text, str) for text in texts):
            raise InputError(f"{source}: `completion` must be a string or a list of strings")
        return Case(source, prompt, texts, 0, columns)
    answer = _text(row.get("answer"))
    gold = [form.format(answer) for _, form in SPELLINGS] if answer else []
    other = next((text for text in answers if text and text != answer), None)
    question = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    wrong = ["", "I do not know.", question if other is None else other]
    return Case(source, prompt, (*gold, *wrong), len(gold), columns)


def _text(answer: Any) -> str:
    """Return the gold answer as a completion; empty if the answer is neither a string nor a number."""
    is_number = isinstance(answer, (int, float)) and not isinstance(answer, bool)
    return str(answer).strip() if is_number or isinstance(answer, str) else ""
