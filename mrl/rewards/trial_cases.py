"""Makes what `mrl reward test` scores: the rows of a file, with completions that should differ.

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
"""How the gold answer is written. A reward need not understand all of them."""
RESERVED = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class Case:
    """A `Case` is one row with its G completions."""

    source: str
    """`file:line`."""
    prompt: Any
    texts: tuple[str, ...]
    """The row's own `completion`; or the gold answer in each of SPELLINGS, then wrong ones."""
    num_gold: int
    """The number of `texts`, from the first, that are the gold answer."""
    columns: dict[str, Any]

    def request(
        self, encode: Callable[[str], list[int]], only: int | None = None
    ) -> dict[str, Any]:
        """Return the request for all of `texts`, or for one of them."""
        texts = list(self.texts) if only is None else [self.texts[only]]
        columns: dict[str, Any] = {key: [value] * len(texts) for key, value in self.columns.items()}
        columns["completion_ids"] = [encode(text) for text in texts]
        return {"prompts": [self.prompt] * len(texts), "completions": texts, "columns": columns}


def make_cases(rows: list[tuple[str, dict[str, Any]]]) -> list[Case]:
    """Make one case for each row, `(file:line, columns)`. Raises InputError where a row is to blame."""
    answers = [_text(row.get("answer")) for _, row in rows]
    return [_case(source, row, answers) for source, row in rows]


def _case(source: str, row: dict[str, Any], answers: list[str]) -> Case:
    prompt = row.get("prompt")
    if not isinstance(prompt, (str, list)) or not prompt:
        raise InputError(f"{source}: `prompt` must be a string or a list of messages")
    for name in RESERVED:
        if name in row:
            raise InputError(
                f"{source}: column {name!r} is a name the reward call needs; rename it"
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
    """Return the gold answer as a completion; empty where it cannot be written as one."""
    is_number = isinstance(answer, (int, float)) and not isinstance(answer, bool)
    return str(answer).strip() if is_number or isinstance(answer, str) else ""
