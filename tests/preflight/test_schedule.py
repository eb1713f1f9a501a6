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
    recipe = with_schedule(load_recipe(TOY_RECIPE, [*STEPS, cosine]))
    assert recipe.optimizer.lr_decay_steps == 12
    given = with_schedule(load_recipe(TOY_RECIPE, [*STEPS, cosine, "optimizer.lr_decay_steps=5"]))
    assert given.optimizer.lr_decay_steps == 5
    plain = load_recipe(TOY_RECIPE, [*STEPS])
    assert with_schedule(plain) == plain


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
        with_schedule(recipe)
    assert all(part in str(caught.value) for part in parts), caught.value
