import json
from pathlib import Path

import pytest

from mrl.data import reasoning_gym
from mrl.data.first_char import first_char_rows
from mrl.data.reasoning_gym import parse_param, task_rows
from mrl.data.repeat import repeat_rows
from mrl.errors import InputError

DATA = Path(__file__).parents[2] / "launch/recipes/data"


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_committed_prompts_are_what_the_generators_write():
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    assert rows_of(DATA / "first_char.jsonl") == first_char_rows(512, 0)
    chain = json.loads(json.dumps(task_rows("chain_sum", 128, 1, params)))
    assert rows_of(DATA / "chain_sum.jsonl") == chain
    shown = task_rows("chain_sum", 256, 1000, params, demonstrations=True)
    assert rows_of(DATA / "chain_sum_demonstrations.jsonl") == shown
    assert rows_of(DATA / "repeat.jsonl") == repeat_rows(256, 0)
    shown = repeat_rows(128, 1, demonstrations=True)
    assert rows_of(DATA / "repeat_demonstrations.jsonl") == shown
    assert sum(file.stat().st_size for file in DATA.iterdir()) < 100_000


def test_first_char_rows():
    prompts = [row["prompt"] for row in first_char_rows(400, 5)]
    assert len(set(prompts)) == 400
    assert {len(prompt) for prompt in prompts} == {16}
    assert [sum(p[0] == c for p in prompts) for c in "abcd"] == [100] * 4


def test_repeat_rows_have_a_long_tail():
    asked = sorted(int(row["prompt"][2:5]) for row in repeat_rows(2000, 5))
    assert 11 <= asked[1000] <= 13
    assert asked[1900] > 4 * asked[1000]
    assert (asked[0], asked[-1]) == (3, 128)
    shown = repeat_rows(400, 5, demonstrations=True)
    ratios = sorted(len(row["completion"]) / int(row["prompt"][2:5]) for row in shown)
    assert 0.9 <= ratios[200] <= 1.1
    right = sum(row["completion"].count(row["prompt"][0]) for row in shown)
    assert 0.40 < right / sum(len(row["completion"]) for row in shown) < 0.47  # 1/4 + 3/16


def test_command_line(tmp_path, monkeypatch, capsys):
    out = tmp_path / "sub" / "rows.jsonl"

    def run(*arguments):
        common = ["reasoning_gym", "--num", "3", "--seed", "7", "--out", str(out)]
        monkeypatch.setattr("sys.argv", [*common, *arguments])
        return reasoning_gym.main()

    assert run("chain_sum", "--param", "max_terms=2") == 0
    rows = rows_of(out)
    assert len(rows) == 3
    assert set(rows[0]) == {"prompt", "answer", "info"}
    assert run("chain_sums") == 2
    error = "error: reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'?\n"
    assert capsys.readouterr().err == error


def test_bad_parameters():
    with pytest.raises(InputError, match="max_term"):
        task_rows("chain_sum", 3, 0, {"max_term": 2})
    with pytest.raises(InputError, match="expected key=value"):
        parse_param("max_terms")
