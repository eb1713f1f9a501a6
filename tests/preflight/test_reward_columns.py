"""Which columns a reward needs, as `mrl check` sees it."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import torch

from mrl.config import load_recipe
from mrl.environments.base import check_arguments, check_reset, environment_names
from mrl.environments.openai_chat import check_target
from mrl.errors import InputError
from mrl.preflight.data import check_prompts
from mrl.preflight.reward_columns import check_reward_columns, needed_columns
from mrl.rewards.resolve import resolve_reward, reward_names
from mrl.types import Prompt
from tests.loop.conftest import TOY_RECIPE

REWARDS = """
def ours(prompts, completions, *, answer, note="", **columns): ...
def custom(cfg, item, **keywords): return float(item.response == item.label)
def score(source, response, truth, extra): return float(response == truth)
"""


def test_needed_columns(tmp_path) -> None:
    file = tmp_path / "rewards_of_mine.py"
    file.write_text(REWARDS)
    assert needed_columns(f"{file}:ours") == ["answer"]
    for form, name in (("slime", "custom"), ("verl", "score")):  # other names than the framework's
        assert needed_columns(f"{form}:{file}:{name}") == []
        given = {"label": ["a"], "ground_truth": ["a"], "answer": ["a"]}
        reward = resolve_reward(f"{form}:{file}:{name}")
        assert asyncio.run(reward(["p"], ["a"], **given)) == [1.0]


NAMES = ("self", "args", "kwargs", "action", "seed", "function", "spec", "columns", "result")
CLASHES = """
class Grader:
    def __call__(self, prompts, completions, **columns): ...
    def grade(self, completions, **kwargs): ...

grader, grade, of_trl = Grader(), Grader().grade, Grader().__call__
def plain(prompts, completions, **columns): ...
def starred(*args, **kwargs): ...
def trl(completions, **kwargs): ...

class Game:
    def reset(self, question, number, **columns): ...
    def step(self, action): ...

class Talk:
    def reset(self, first, number, **columns): ...
    def __call__(self, messages, **columns): ...

def talk(messages, **columns): ...

class Narrow:
    def reset(self, prompt, seed): ...
    def step(self, action): ...
"""


def row(**columns) -> Prompt:
    return Prompt("0", torch.tensor([1]), "p", columns, "data.jsonl:1")


@pytest.mark.parametrize(
    ("name", "clash"),
    [
        ("grader", "self"), ("grade", "self"), ("of_trl", "self"), ("trl", "trainer_state"),
        ("trl:plain", "trainer_state"), ("plain", None), ("starred", None), ("trl", None),
        ("verl:plain", None),
    ],
)  # fmt: skip
def test_a_column_whose_name_the_call_needs_is_refused(name, clash, tmp_path) -> None:
    """It was found by the first call of the run: `got multiple values for argument`."""
    (tmp_path / "clashes.py").write_text(CLASHES)
    form, colon, name = name.rpartition(":")
    spec = f"{form}{colon}{tmp_path}/clashes.py:{name}"
    columns = dict.fromkeys([clash] if clash else NAMES, "x")
    if clash is None:
        check_reward_columns([row(**columns)], spec, {})
        return
    said = f"data.jsonl:1: column {clash!r} has the name of another argument of the "
    with pytest.raises(InputError) as error:
        check_reward_columns([row(**columns)], spec, {})
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("name", [*reward_names(), "http://127.0.0.1:1"])
def test_a_reward_of_ours_takes_a_column_of_any_name(name) -> None:
    function = resolve_reward(name)
    columns = dict.fromkeys([*NAMES, *needed_columns(name)], "x")
    check_reward_columns([row(**columns)], name, {})
    inner = getattr(function, "__call__", function)  # noqa: B004
    assert "self" not in str(inspect.signature(inner))


def test_a_column_that_reset_cannot_take_is_refused(tmp_path) -> None:
    (tmp_path / "games.py").write_text(CLASHES)
    for name, column, why in (
        ("Game", "self", "multiple values for argument 'self'"),
        ("Game", "question", "multiple values for argument 'question'"),
        ("Narrow", "answer", "got an unexpected keyword argument 'answer'"),
    ):
        with pytest.raises(InputError, match=f"data:3: column '{column}' cannot be passed .*{why}"):
            check_reset(
                f"{tmp_path}/games.py:{name}", ["info", column][name == "Narrow" :], "data:3"
            )
    check_reset(f"{tmp_path}/games.py:Narrow", [], "data:3")
    for name in environment_names():
        check_reset(name, NAMES, "data:3")


def test_a_column_that_reset_needs_and_arguments_of_the_environment(tmp_path) -> None:
    (tmp_path / "games.py").write_text(
        "class Game:\n"
        "    def __init__(self, size, speed=1): ...\n"
        "    def reset(self, prompt, seed, gold, level=0, *, goal, **columns): ...\n"
        "    def step(self, action): ...\n"
    )
    game = f"{tmp_path}/games.py:Game"
    check_reset(game, ["gold", "goal"], "data:3")
    with pytest.raises(
        InputError, match=r"^data:3: no column `goal`, which reset.* row has gold; "
    ):
        check_reset(game, ["gold"], "data:3")
    check_arguments(game, {"size": 2})
    with pytest.raises(
        InputError, match=r"missing a required argument: 'size'; its arg.*: size, speed=1"
    ):
        check_arguments(game, {})
    with pytest.raises(InputError, match="got an unexpected keyword argument 'siz'"):
        check_arguments(game, {"size": 2, "siz": 3})


def test_a_column_that_a_chat_target_cannot_take_is_refused(tmp_path) -> None:
    (tmp_path / "games.py").write_text(CLASHES)
    for name, column, call in (
        ("talk", "messages", "the call"),
        ("Talk", "messages", "the call"),
        ("Talk", "self", "the call"),
        ("Talk", "first", r"reset\(\)"),
    ):
        said = (
            f"d:3: column '{column}' cannot be passed to {call} .* values for argument '{column}'"
        )
        with pytest.raises(InputError, match=said):
            check_target(f"{tmp_path}/games.py:{name}", ["info", column], "d:3")
    for name in ("talk", "Talk"):
        check_target(f"{tmp_path}/games.py:{name}", ["info", "seed", "prompt"], "d:3")


def test_the_columns_of_a_row_are_checked_with_the_chat_target_of_the_recipe(tmp_path) -> None:
    (tmp_path / "games.py").write_text(CLASHES)
    target = f"environment.arguments.target={tmp_path}/games.py:talk"
    recipe = load_recipe(TOY_RECIPE, ["reward=null", "environment.name=openai_chat", target])
    check_prompts([row(info="x")], None, recipe, pytest.fail, True)
    prompts = [row(messages="x")]
    with pytest.raises(InputError, match="column 'messages' cannot be passed to the call"):
        check_prompts(prompts, None, recipe, pytest.fail, True)
    check_prompts(prompts, None, recipe, pytest.fail, False)  # nothing of the user is imported
