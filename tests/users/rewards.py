"""Rewards: functions of other frameworks, several with weights, parts, and the rows of a failure."""

from __future__ import annotations

import json

from tests.users.things import User, thing

FUNCTIONS = """
def length(completions, **kwargs):
    return [len(text) / 100 for text in completions]


def parts(prompts, completions, **columns):
    return [{"accuracy": float(text[:1] == prompt[:1]), "format": 0.1} for prompt, text in
            zip(prompts, completions)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "acc": 1.0}


def raises(prompts, completions, **columns):
    raise KeyError("solution")
"""


@thing("My reward is TRL's: def f(completions, **kwargs).", is_long=False)
def trl_form(user: User) -> str:
    file, data = user.write("mine.py", FUNCTIONS), user.write("d.jsonl", '{"prompt": "a"}\n')
    return user.mrl("reward", "test", f"{file}:length", data).strip().splitlines()[-1]


@thing("My reward is verl's compute_score, and my rows are verl's.")
def verl_form(user: User) -> str:
    file = user.write("mine.py", FUNCTIONS)
    rows = [
        {"prompt": f"{n} + {n} =", "answer": str(2 * n), "data_source": "sums", "extra_info": {}}
        for n in (11, 23)
    ]
    data = user.write("d.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    printed = user.mrl("reward", "test", f"{file}:compute_score", data)
    assert "ok:" in printed
    return printed.strip().splitlines()[-1]


@thing("I train on two rewards with weights, one of which has parts.")
def several_rewards(user: User) -> str:
    file = user.write("mine.py", FUNCTIONS)
    rewards = f"[{{path: '{file}:parts'}}, {{path: '{file}:length', weight: 0.5}}]"
    user.train("run", f"reward={rewards}", "train.num_steps=1")
    row = json.loads((user.folder / "run/metrics.jsonl").read_text())
    mean = row["rewards/parts/mean"] + 0.5 * row["rewards/length/mean"]
    assert abs(row["reward/mean"] - mean) < 1e-6
    (first, *_) = (user.folder / "run/rollouts/step_000000.jsonl").read_text().splitlines()
    parts = json.loads(first)["reward_parts"]
    assert set(parts) == {"parts", "parts/accuracy", "parts/format", "length"}
    return f"reward {row['reward/mean']:.4f} = {mean:.4f}; a sample has {parts}"


@thing("My reward raises on every row.")
def failing_reward(user: User) -> str:
    file = user.write("mine.py", FUNCTIONS)
    printed = user.train("run", f"reward={file}:raises", code=70)
    (line,) = [line for line in printed.splitlines() if line.startswith("mrl: reward")]
    assert "KeyError: 'solution'" in line
    assert "first_char.jsonl:" in line
    return line


@thing("I name a reward twice in a list.", is_long=True)
def named_twice(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "reward=[first_char, first_char]", code=2)
    assert "the name first_char occurs twice" in printed
    return printed.strip()
