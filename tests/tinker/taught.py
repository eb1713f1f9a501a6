"""A toy model that has been taught the form of the answers that the recipes ask for, but not which
answers are right, so that its rewards differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM

from mrl.toy_model import CHARACTERS, EOS, IM_START, build_tokenizer, write_toy_model

STEPS, LR, CLIP = 600, 5e-3, 1.0
TOKENS_PER_STEP = 1024
LENGTHS, LONG = (96, 96, 96, 128, 256, 1024), (96, 1024, 3072)
"""Lengths of the sequences of a step, which takes one of them; the last NUM_LONG steps take LONG."""
NUM_LONG = 80
CONTEXT = 8192
WORDS = (
    "we",
    "read",
    "of",
    "many",
    "towns",
    "where",
    "a",
    "river",
    "went",
    "by",
    "later",
    "for",
    "time",
)
TURN = f"{EOS}\n{IM_START}assistant\n"
Draw = random.Random


def boxed(draw: Draw) -> tuple[str, str]:
    """A sum of `rl_loop`: the end of its prompt, and an answer."""
    return " written inside \\boxed{}.\n\nAssistant:", f" \\boxed{{{draw.randrange(5)}}}\n\nUser:"


def guess(draw: Draw) -> tuple[str, str]:
    """A turn of `guess_number`; one in four answers has the wrong form."""
    says = draw.choice(["or correct.", "User: Too low", "User: Too high", "say nothing else."])
    form = draw.choice(["Guess: ", "Guess: ", "Guess: ", "I guess "])
    return f"{says}\n\nAssistant:", f" {form}{draw.randrange(1025)}\n\nUser:"


def call(draw: Draw) -> tuple[str, str]:
    """A turn of `rl_numerics_check`: three of four read a page, the others answer."""
    says = draw.choice(["a single integer.", "\n</tool_response>"])
    answer = f"Answer: {draw.randrange(4)}{EOS}"
    return f"{says}{TURN}", draw.choice([*(tool_call(page) for page in (1, 2, 3)), answer])


def tool_call(page: int) -> str:
    arguments = f'{{"page": {page}}}'
    call = f'{{"name": "read_page", "arguments": {arguments}}}'
    return f"<tool_call>\n{call}\n</tool_call>{EOS}"


FORMS: tuple[Callable[[Draw], tuple[str, str]], ...] = (boxed, guess, call, call)


def text(draw: Draw, num_chars: int) -> str:
    """Return a text of at least `num_chars` characters: words, and some of random characters."""
    words = [
        draw.choice(WORDS) if draw.random() < 0.7 else "".join(draw.choices(CHARACTERS, k=4))
        for _ in range(num_chars // 2 + 1)
    ]
    return " ".join(words)


def write_taught_toy(folder: Path) -> None:
    """Write a toy model, and teach it the answers of FORMS after any text."""
    write_toy_model(folder, seed=0, max_position_embeddings=CONTEXT)
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, draw = build_tokenizer(), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    for step in range(STEPS):
        length = draw.choice(LENGTHS if step < STEPS - NUM_LONG else LONG)
        ids, labels = [], []
        for _ in range(max(1, TOKENS_PER_STEP // length)):
            end, answer = (tokenizer.encode(part) for part in draw.choice(FORMS)(draw))
            before = tokenizer.encode(text(draw, length))
            own = [*before, *end][len(answer) - length :] + answer
            ids.append(own)
            labels.append([-100] * (length - len(answer)) + answer)
        loss = model(input_ids=torch.tensor(ids), labels=torch.tensor(labels)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
