"""What a recipe says of its schedule: the numbers that follow, and what is refused."""

from __future__ import annotations

import pytest

from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.preflight.schedule import with_schedule
from tests.loop.conftest import TOY_RECIPE

STEPS = ("train.num_steps=6", "train.num_steps_per_rollout=2")


def test_the_decay_takes_all_optimizer_steps_of_the_run() -> None:
    cosine = "optimizer.lr_decay_style=cosine"
    recipe = with_schedule(load_recipe(TOY_RECIPE, [*STEPS, cosine]), 8)
    assert recipe.optimizer.lr_decay_steps == 12
    given = with_schedule(
        load_recipe(TOY_RECIPE, [*STEPS, cosine, "optimizer.lr_decay_steps=5"]), 8
    )
    assert given.optimizer.lr_decay_steps == 5
    twice = load_recipe(TOY_RECIPE, [*STEPS, cosine, "train.num_epochs_per_rollout=2"])
    assert with_schedule(twice, 8).optimizer.lr_decay_steps == 24
    warm = load_recipe(TOY_RECIPE, [*STEPS, cosine, "critic.warmup_steps=2"])
    assert with_schedule(warm, 8).optimizer.lr_decay_steps == 8
    plain = load_recipe(TOY_RECIPE, [*STEPS])
    assert with_schedule(plain, 8) == plain


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (["min_lr=1e-9"], ["optimizer.min_lr is 1e-09", "lr_decay_style is constant"]),
        (["lr_decay_steps=4"], ["optimizer.lr_decay_steps is 4", "lr_decay_style is constant"]),
        (["lr_decay_style=linear", "min_lr=1"], ["optimizer.min_lr is 1.0, above optimizer.lr"]),
        (["lr_decay_style=linear", "lr_warmup_steps=12"], ["lr_warmup_steps is 12", "after 12"]),
        (["lr_decay_style=WSD"], ["give optimizer.wsd_decay_steps"]),
        (
            ["lr_decay_style=WSD", "wsd_decay_steps=11", "lr_warmup_steps=2"],
            ["wsd_decay_steps is 11", "only 10 of the 12"],
        ),
        (["lr_decay_style=linear", "wsd_decay_steps=1"], ["lr_decay_style is linear; set that to"]),
    ],
)
def test_what_contradicts_itself_is_refused(keys: list[str], parts: list[str]) -> None:
    recipe = load_recipe(TOY_RECIPE, [*STEPS, *(f"optimizer.{key}" for key in keys)])
    with pytest.raises(InputError) as caught:
        with_schedule(recipe, 8)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("key", ["train.num_epochs", "rollout.over_sampling"])
def test_numbers_that_make_infinitely_many_steps_or_prompts_are_refused(key: str) -> None:
    with pytest.raises(InputError, match=rf"{key}.*1000000"):
        with_schedule(load_recipe(TOY_RECIPE, [f"{key}=1.0e+308"]), 10)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (0.4, 1), (4, 10)])
def test_passes_over_the_data_set_are_steps(epochs: float, steps: int) -> None:
    """10 prompts and 4 a step: a step may hold the end of a pass and the start of the next."""
    keys = ["train.num_steps=0", f"train.num_epochs={epochs}", "rollout.prompts_per_step=4"]
    recipe = load_recipe(TOY_RECIPE, [*keys, "optimizer.lr_decay_style=linear"])
    found = with_schedule(recipe, 10)
    assert (found.train.num_steps, found.train.num_epochs) == (steps, None)
    assert found.optimizer.lr_decay_steps == steps
    assert with_schedule(found, 10) == found  # as a resumed run reads it


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        (
            ["train.num_steps=0"],
            "train.num_steps: expected at least 1, got 0; give it, or train.num_e",
        ),
        (["train={micro_batch_tokens: 64}"], "train.num_steps: required, and not given; give it"),
        (["train.num_epochs=2"], "train.num_steps is 6 and train.num_epochs is 2; give one"),
        (
            ["train.num_steps=0", "train.num_epochs=2", "algorithm.dynamic_sampling=true"],
            "with algorithm.dynamic_sampling the number of prompts",
        ),
        (
            ["train.num_steps=0", "train.num_epochs=2", "rollout.over_sampling=2"],
            "with rollout.over_sampling the number of prompts",
        ),
    ],
)
def test_passes_that_are_not_a_number_of_steps_are_refused(keys: list[str], part: str) -> None:
    with pytest.raises(InputError) as caught:
        with_schedule(load_recipe(TOY_RECIPE, ["train.num_steps=6", *keys]), 10)
    assert part in str(caught.value)
