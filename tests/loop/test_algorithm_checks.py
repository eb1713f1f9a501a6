"""What is refused before the start: a critic, shaping and dynamic sampling that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.algorithms import list_algorithms, load_algorithm
from mrl.config import Recipe, load_recipe
from mrl.errors import InputError
from mrl.preflight.algorithm import (
    check_dynamic_sampling,
    check_group_size,
    check_shaping,
    read_critic,
)
from mrl.toy_model import write_toy_model
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from tests.loop.conftest import TOY_RECIPE, Toy

ENVIRONMENT = ("reward=null", "environment.name=guess_letter")
SHAPING: dict[str, tuple[list[str], str]] = {
    "longer than an answer": (["overlong_buffer_len=13"], "at most rollout.max_response_len 12"),
    "episodes": (["overlong_buffer_len=4"], "several responses"),
    "filter of one length": (["overlong_filter=true"], "cut off at the same length"),
}
MORE = {
    "episodes": ENVIRONMENT,
    "filter of one length": ("rollout.min_response_len=12",),
}
SAMPLING: dict[str, tuple[list[str], str]] = {
    "rounds of nothing": (["rollout.dynamic_sampling_rounds=2"], "dynamic_sampling is off"),
    "with over-sampling": (
        ["algorithm.dynamic_sampling=true", "rollout.over_sampling=1.5"],
        "rollout.over_sampling is 1.5",
    ),
    "single samples": (
        ["algorithm.dynamic_sampling=true", "rollout.samples_per_prompt=1"],
        "no group has a signal",
    ),
}


def recipe_of(toy: Toy, *overrides: str) -> Recipe:
    return load_recipe(TOY_RECIPE, toy.overrides(Path("nowhere"), *overrides))


@pytest.mark.parametrize("case", SHAPING)
def test_shaping(case: str, toy: Toy) -> None:
    keys, text = SHAPING[case]
    recipe = recipe_of(toy, *(f"algorithm.{key}" for key in keys), *MORE.get(case, ()))
    with pytest.raises(InputError, match=text):
        check_shaping(recipe)
    check_shaping(recipe_of(toy, *MORE.get(case, ())))
    check_shaping(recipe_of(toy, "algorithm.overlong_filter=true"))


@pytest.mark.parametrize("case", SAMPLING)
def test_dynamic_sampling(case: str, toy: Toy) -> None:
    overrides, text = SAMPLING[case]
    with pytest.raises(InputError, match=text):
        check_dynamic_sampling(recipe_of(toy, *overrides))
    check_dynamic_sampling(recipe_of(toy, "algorithm.dynamic_sampling=true"))


@pytest.mark.parametrize("name", list_algorithms())
def test_single_samples_only_where_no_group_is_compared(name: str, toy: Toy) -> None:
    if name == "nll":  # supervised
        return
    one = (f"algorithm.name={name}", "rollout.samples_per_prompt=1")
    algorithm = load_algorithm(name)
    check_group_size(recipe_of(toy, *one[:1]), algorithm)
    check_group_size(recipe_of(toy, *one, "debug.rollout_only=true"), algorithm)
    if name in ("ppo", "vapo", "reinforce_pp", "decoupled_ppo", "a3po"):
        check_group_size(recipe_of(toy, *one), algorithm)
        return
    with pytest.raises(InputError, match=f"but {name} compares the samples of a prompt"):
        check_group_size(recipe_of(toy, *one), algorithm)


def test_critic(toy: Toy, tmp_path: Path) -> None:
    model = HfModel.read(toy.model)

    def read(*overrides: str, needed: bool = True) -> HfModel | None:
        recipe = recipe_of(toy, *overrides)
        return read_critic(recipe, needed, model, ParallelDims.create(recipe.parallel, 1))

    assert read(needed=False) is None
    assert read() is model
    assert read("critic.lr=1e-4") is model
    with pytest.raises(InputError, match="algorithm gspo has no critic"):
        read("critic.lr=1e-4", needed=False)
    with pytest.raises(InputError, match=r"critic\.path: no folder /nowhere"):
        read("critic.path=/nowhere")
    other = tmp_path / "other"
    write_toy_model(other, vocab_size=112, num_layers=1)
    with pytest.raises(InputError, match="vocabulary of 112, expected at least the policy's 128"):
        read(f"critic.path={other}")
    write_toy_model(other, num_layers=1, num_experts=4)
    found = read(f"critic.path={other}")
    assert found is not None
    assert found.sizes.num_layers == 1
