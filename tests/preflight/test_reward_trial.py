"""`mrl check` and the start of `mrl train` call the user's reward functions on real rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.preflight.reward_trial import try_rewards
from mrl.toy_model import build_tokenizer
from mrl.types import Prompt
from tests.loop.conftest import TOY_RECIPE

IDS = torch.tensor([1])
REWARDS = """
import os

def text(prompts, completions, *, answer, **columns):
    return ["good" for _ in completions]

def too_few(prompts, completions, **columns):
    return [1.0]

def hangs(prompts, completions, **columns):
    while True: pass

def raises(prompts, completions, *, answer, **columns):
    return [len(answer) / len(gold["x"]) for gold in answer]

def dies(prompts, completions, **columns):
    os._exit(3)

def none(prompts, completions, **columns):
    return [None] * len(completions)

def last_word(prompts, completions, *, answer, **columns):
    return [float(text.split()[-1] == gold) for text, gold in zip(completions, answer)]

def notes(prompts, completions, *, answer, completion_ids, **columns):
    with open(os.environ["NOTES"], "a") as file:
        print(prompts[0], completions, answer[0], [len(ids) for ids in completion_ids], file=file)
    return [0.0 for _ in completions]
"""


def tried(path: Path, *names: str) -> list[str]:
    """Return the warnings of a trial of functions of REWARDS on made-up rows."""
    file = path / "rewards.py"
    file.write_text(REWARDS)
    rewards = json.dumps([f"{file}:{name}" for name in names])
    recipe = load_recipe(TOY_RECIPE, [f"reward={rewards}", "reward_timeout_s=2"])
    prompts = [
        Prompt(f"{n}", IDS, f"question {n}", {"answer": f"{n}"}, f"rows.jsonl:{n + 1}")
        for n in range(3)
    ]
    said: list[str] = []
    try_rewards(recipe, prompts, [], build_tokenizer(), said.append)
    return said


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (
            "text",
            "gave a wrong value: reward 0 is 'good', expected a number or None; mrl reward test",
        ),
        ("too_few", "returned 1 rewards for 3 completions; mrl reward test"),
        ("hangs", "failed (no answer within 2 s, killed)"),
        ("raises", "failed (TypeError: string indices must be integers"),
        ("dies", "failed ("),
    ],
)
def test_a_reward_that_scores_nothing_is_refused(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        tried(tmp_path, name)
    message = str(caught.value)
    assert message.startswith(f"rows.jsonl:1: the reward '{tmp_path}/rewards.py:{name}' {what}")
    assert "NotANumber" not in message
    assert "BrokenReward" not in message


def test_what_a_reward_cannot_score_is_named(tmp_path: Path) -> None:
    failed, nothing = tried(tmp_path, "last_word", "none")
    assert "last_word' failed (IndexError: list index out of range) for the completion ''" in failed
    assert "such samples are masked" in failed
    assert "none' gave None for the completions '0', 'I do not know.', ''" in nothing


def test_a_function_is_called_once_and_what_is_not_the_users_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(notes))
    assert tried(tmp_path, "notes") == []
    assert notes.read_text() == "question 0 ['0', 'I do not know.', ''] 0 [2, 15, 1]\n"
    for reward in ("first_char", "http://127.0.0.1:9", "reward_model:/nowhere"):
        recipe = load_recipe(TOY_RECIPE, [f"reward={reward}"])
        prompt = Prompt("0", IDS, "ab", {}, "rows.jsonl:1")
        try_rewards(recipe, [prompt], [], None, pytest.fail)
