import json

import pytest

from mrl.data.reasoning_gym import task_rows
from mrl.rewards.first_char import reward as first_char
from mrl.rewards.repeat import reward as repeat


def test_first_char_counts_tokens():
    chat = [{"role": "user", "content": "b"}]
    got = first_char(
        ["abc", "abc", "abc", chat],
        ["aaxx", "aa", "", "bb"],
        completion_ids=[[1] * 4, [1] * 4, [], [1] * 2],
    )
    assert got == [0.5, 0.5, 0.0, 1.0]


def test_repeat_wants_the_letter_as_often_as_asked():
    completions = ["bbbb", "bb", "b" * 8, "b", "b" * 16, "baab", "", "b" * 800]
    ids = [[1] * (len(text) + 1) for text in completions]  # with the end token
    got = repeat(["b*004="] * 8, completions, completion_ids=ids)
    assert got == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.0, 0.01]


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "letter_counting", "countdown"])
def test_verifier_accepts_its_own_answers_after_json(task):
    # Not at the top: reasoning-gym takes a second of every worker, which collects all files.
    from mrl.rewards.reasoning_gym import reward as reasoning_gym

    rows = json.loads(json.dumps(task_rows(task, 4, 3, {})))
    columns = {key: [row[key] for row in rows] for key in ("answer", "info")}
    prompts = [row["prompt"] for row in rows]
    right = [row["answer"] for row in rows]
    assert reasoning_gym(prompts, right, **columns) == [1.0] * 4
    assert max(reasoning_gym(prompts, ["no idea"] * 4, **columns)) < 0.5
