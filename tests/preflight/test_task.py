"""Every sample has something that scores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.load import recipe_of
from mrl.config.recipe import Recipe
from mrl.errors import InputError
from mrl.preflight.reward_columns import check_reward_columns
from mrl.preflight.task import check_task
from mrl.types import Prompt

OWN = {"path": "a.jsonl", "reward": "first_char"}
SEVERAL = {"path": "b.jsonl", "reward": [{"path": "first_char"}, {"path": "repeat", "weight": 2}]}


def recipe(sources: list[Any], **more: Any) -> Recipe:
    tree = {"model": {"path": "m"}, "train": {"num_steps": 1}, "rollout": {"max_response_len": 8}}
    return recipe_of({**tree, "data": {"sources": sources}, "output_dir": "r", **more}, [], "test")


def test_sources_with_rewards_need_no_other():
    check_task(recipe([OWN, SEVERAL]))
    without = [OWN, {"path": "data/c.csv"}]
    with pytest.raises(InputError, match=r"the source c\.csv has no reward of its own"):
        check_task(recipe(without))
    check_task(recipe(without, reward="repeat"))
    with pytest.raises(InputError, match="the evaluation set aime has no reward of its own"):
        check_task(recipe([{"path": "a.jsonl"}]), "aime")


def test_a_reward_in_a_list_of_a_source_must_exist():
    broken = {"path": "b.jsonl", "reward": [{"path": "frist_char"}]}
    with pytest.raises(InputError, match="frist_char"):
        check_task(recipe([OWN, broken]))
    with pytest.raises(InputError, match="an environment gives the rewards itself"):
        check_task(recipe([SEVERAL], environment={"name": "guess_letter"}))


def test_saved_rollouts_that_are_nowhere_are_found_before_the_run_folder_is_read() -> None:
    with pytest.raises(
        InputError, match=r"debug\.load_rollouts: no folder /nowhere; give the roll"
    ):
        check_task(recipe([OWN], debug={"load_rollouts": "/nowhere"}))


def test_code_of_the_user_is_left_to_its_worker_where_that_is_asked_for(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(f"open('{tmp_path}/imported', 'w')\n")
    prompt = Prompt("1", torch.tensor([1]), "p", {}, "rows.jsonl:1")
    rewards = f"{code}:score"
    check_task(recipe([OWN, SEVERAL], reward=rewards), imports_rewards=False)
    check_task(recipe([{"path": "a"}], environment={"name": f"{code}:E"}), imports_rewards=False)
    check_reward_columns([prompt], rewards, {}, imports_rewards=False)
    assert not (tmp_path / "imported").exists()
    with pytest.raises(InputError, match="no column `answer`"):  # mrl's own are asked
        check_reward_columns([prompt], "exact_match", {}, imports_rewards=False)
    with pytest.raises(InputError, match="no function 'score' in it"):
        check_task(recipe([OWN], reward=rewards))
    assert (tmp_path / "imported").exists()
