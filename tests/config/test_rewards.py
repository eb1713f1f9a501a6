"""`reward` is a name, or a list of rewards with weights."""

from __future__ import annotations

import pytest

from mrl.config import RewardConfig, dump_recipe, load_recipe
from mrl.config.reward import describe_rewards
from mrl.errors import InputError
from tests.loop.conftest import TOY_RECIPE


def loaded(reward: str):
    return load_recipe(TOY_RECIPE, [f"reward={reward}"]).reward


def test_names_and_paths_fill_each_other(tmp_path):
    assert loaded("first_char") == "first_char"
    rewards = loaded(
        "[first_char, {name: repeat, weight: 0.5}, {path: 'a/style.py:score'}, "
        "{name: mine, path: 'pack.age:f'}, {path: 'reward_model:models/rm'}, {path: b/c.py}]"
    )
    assert isinstance(rewards, tuple)
    assert [(each.name, each.path, each.weight) for each in rewards] == [
        ("first_char", "first_char", 1),
        ("repeat", "repeat", 0.5),
        ("score", "a/style.py:score", 1),
        ("mine", "pack.age:f", 1),
        ("rm", "reward_model:models/rm", 1),
        ("c", "b/c.py", 1),
    ]
    recipe = load_recipe(TOY_RECIPE, ["reward=[{name: a, path: 'x.py:f'}, first_char]"])
    dump_recipe(recipe, tmp_path / "config.yaml")
    assert load_recipe(tmp_path / "config.yaml").reward == recipe.reward


def test_files_in_a_list_are_found_from_the_recipe(tmp_path):
    (tmp_path / "style.py").write_text("")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TOY_RECIPE.read_text())
    text = recipe.read_text().replace(
        "reward: first_char", "reward: [{path: 'style.py:f'}, 'trl:style.py:g']"
    )
    recipe.write_text(text)
    rewards = load_recipe(recipe).reward
    assert isinstance(rewards, tuple)
    assert [each.path for each in rewards] == [
        f"{tmp_path}/style.py:f",
        f"trl:{tmp_path}/style.py:g",
    ]


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        ("3", "reward: expected the name of a reward, or a list of rewards, got 3"),
        ("[]", ": reward: the list is empty"),
        ("[{wieght: 1, name: a}]", "unknown key 'reward.0.wieght'"),
        ("[{name: a, weight: x}]", "reward.0.weight: Input should be a valid number"),
        ("[{weight: 1}]", "reward.0"),
        ("[a, {path: 'x.py:a'}]", "the name a occurs twice"),
        ("[{name: 'a b'}]", "reward.0.name: String should match pattern"),
    ],
)
def test_bad_rewards_are_one_line(reward, reason):
    with pytest.raises(InputError, match=reason) as caught:
        loaded(reward)
    assert "reward name" not in str(caught.value)
    assert "reward list" not in str(caught.value)


def test_a_reward_without_anything_is_refused():
    with pytest.raises(ValueError, match=r"give a name of mrl/rewards/, or a path"):
        RewardConfig(path="")


def test_rewards_whose_weights_nearly_agree_are_told_apart():
    near, other = (loaded(f"[{{name: a, weight: {weight}}}]") for weight in (0.1234567, 0.1234568))
    assert near is not None
    assert other is not None
    assert (describe_rewards(near), describe_rewards(other)) == ("0.1234567 a", "0.1234568 a")
