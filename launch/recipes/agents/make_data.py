"""Writes the rows of the recipes in this folder: `python launch/recipes/agents/make_data.py`.

sums.jsonl: sums and differences of one digit. sums_demonstrations.jsonl shows the toy model how to
call the calculator for them, and to say what it answers. long_sums.jsonl, with demonstrations of other
sums, and shell.jsonl are for a pretrained model, which an example in the prompt shows what to do.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
OPERATIONS = {"+": int.__add__, "-": int.__sub__}


def call_of(a: int, op: str, b: int) -> str:
    call = {"name": "calculate", "arguments": {"a": a, "op": op, "b": b}}
    return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def tasks() -> Iterator[tuple[int, str, int, str]]:
    for a, op, b in itertools.product(range(10), OPERATIONS, range(10)):
        yield a, op, b, str(OPERATIONS[op](a, b))


def sums() -> Iterator[dict[str, Any]]:
    for a, op, b, answer in tasks():
        yield {"prompt": [message("user", f"{a}{op}{b}=")], "answer": answer}


def demonstrations() -> Iterator[dict[str, Any]]:
    for a, op, b, answer in tasks():
        asked = message("user", f"{a}{op}{b}=")
        call = call_of(a, op, b)
        yield {"prompt": [asked], "completion": call}
        yield {
            "prompt": [asked, message("assistant", call), message("tool", answer)],
            "completion": answer,
        }


def solved(a: int, b: int) -> list[dict[str, str]]:
    """Return the messages of a solved sum: question, tool call, result, answer."""
    return [
        message("user", f"What is {a} + {b}?"),
        message("assistant", call_of(a, "+", b)),
        message("tool", str(a + b)),
        message("assistant", f"{a} + {b} = {a + b}"),
    ]


def sums_of_four_digits(seed: int, num: int) -> Iterator[tuple[int, int]]:
    draw = random.Random(seed)
    for _ in range(num):
        yield draw.randint(1000, 9999), draw.randint(1000, 9999)


BEFORE = [message("system", "Use the calculator: answer with a tool call."), *solved(2140, 3315)]


def long_sums() -> Iterator[dict[str, Any]]:
    """Sums that a small model does not compute itself, after one that is solved."""
    for a, b in sums_of_four_digits(0, 64):
        yield {"prompt": [*BEFORE, solved(a, b)[0]], "answer": str(a + b)}


def long_demonstrations() -> Iterator[dict[str, Any]]:
    for a, b in sums_of_four_digits(1, 64):
        question, call, result, answer = solved(a, b)
        yield {"prompt": [*BEFORE, question], "completion": call["content"]}
        yield {"prompt": [*BEFORE, question, call, result], "completion": answer["content"]}


def shell() -> Iterator[dict[str, Any]]:
    """Texts of which a command of a shell has to count the words."""
    words = [
        "apple",
        "bird",
        "cloud",
        "door",
        "east",
        "fish",
        "gate",
        "hill",
        "iron",
        "juice",
        "kite",
        "lamp",
        "moon",
        "nest",
        "oak",
    ]
    example = [
        message("user", "How many words has the file? It is named moon.txt."),
        message("assistant", "wc -w moon.txt"),
        message("user", "5 moon.txt"),
        message("assistant", "Answer: 5"),
    ]
    draw = random.Random(1)
    for _ in range(64):
        name = f"{draw.choice(words)}.txt"
        text = " ".join(draw.choice(words) for _ in range(draw.randint(3, 30)))
        question = message("user", f"How many words has the file? It is named {name}.")
        yield {"prompt": [*example, question], "file": name, "text": text}


FILES = {
    "sums.jsonl": sums,
    "sums_demonstrations.jsonl": demonstrations,
    "long_sums.jsonl": long_sums,
    "long_sums_demonstrations.jsonl": long_demonstrations,
    "shell.jsonl": shell,
}


def lines_of(name: str) -> str:
    return "".join(json.dumps(row) + "\n" for row in FILES[name]())


if __name__ == "__main__":
    for each in FILES:
        (FOLDER / each).write_text(lines_of(each))
