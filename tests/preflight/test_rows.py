"""Rows that are read without an error and are probably not meant, and rows that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mrl.data.files import read_rows
from mrl.errors import InputError
from mrl.preflight.reward_columns import check_reward_columns
from mrl.preflight.rows import check_rows
from mrl.types import Prompt
from parallel.hf_config import read_config
from parallel.hf_tensors import _weight_files

NAN = float("nan")


def prompt(line: int, token: int, **columns: object) -> Prompt:
    return Prompt(str(line), torch.tensor([token]), "p", dict(columns), f"rows.jsonl:{line}")


def test_copies_and_numbers_that_are_not_finite_are_named() -> None:
    said: list[str] = []
    check_rows([prompt(1, 5, answer="a"), prompt(2, 5, answer="b"), prompt(3, 6)], said.append)
    assert said == []
    rows = [prompt(1, 5), prompt(2, 6, info={"x": [1.0, NAN]}), prompt(3, 5), prompt(4, 5)]
    check_rows(rows, said.append)
    copies, odd = said
    assert copies.startswith("rows.jsonl:3 is the same row as rows.jsonl:1, and 2 of 4 rows are")
    assert odd.startswith("rows.jsonl:2: the column `info` is not finite (1 of 4 rows)")


def test_a_column_that_the_reward_needs_must_be_finite() -> None:
    rows = [prompt(1, 5, answer="a"), prompt(2, 6, answer=NAN)]
    check_reward_columns(rows[:1], "exact_match", {})
    with pytest.raises(InputError, match=r"rows.jsonl:2: the column `answer`, .* is nan; give"):
        check_reward_columns(rows, "exact_match", {})


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}', ":2: the key `prompt` occurs"),
        ("a.jsonl", '{"prompt": "a", "info": {"x": 1, "x": 1}}', ":1: the key `x` occurs twice"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "a\\ud800b"}', r":2: a string contains \ud800"),
        ("a.json", '[{"prompt": "a"}, {"prompt": "a", "b": "\\uDFFF"}]', r" row 2: a string contains"),
        ("a.json", '[{"prompt": "a", "prompt": "b"}]', ": the key `prompt` occurs twice"),
    ],
)  # fmt: skip
def test_rows_that_python_would_read_otherwise_than_others_are_refused(
    tmp_path: Path, name: str, text: str, reason: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        list(read_rows(file))
    assert str(caught.value).startswith(f"{file}{reason}")


def test_a_null_that_the_reward_needs_is_named() -> None:
    rows = [prompt(1, 5, answer="a"), prompt(2, 6, answer=None)]
    told: list[str] = []
    check_reward_columns(rows, "exact_match", {}, told.append)
    (line,) = told
    assert line.startswith(
        "rows.jsonl:2: the column `answer`, which the reward 'exact_match' needs"
    )
    assert "is null (1 of 2 rows): such rows have no reward and are masked" in line
    with pytest.raises(
        InputError, match=r"rows.jsonl:2: .* is null \(1 of 1 rows\), so nothing has"
    ):
        check_reward_columns(rows[1:], "exact_match", {})


def test_a_key_twice_in_a_model_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "a", "rope": {"x": 1, "x": 2}}')
    with pytest.raises(InputError, match=r"config.json: the key `x` occurs twice in one object"):
        read_config(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    with pytest.raises(InputError, match=r"index.json: the key `a` occurs twice"):
        _weight_files(tmp_path)


def test_a_whole_pair_is_a_character(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "\\ud83d\\ude00"}')
    assert [row for _, row in read_rows(file)] == [{"prompt": "\N{GRINNING FACE}"}]
