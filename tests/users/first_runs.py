"""First runs: check, train, look at it."""

from __future__ import annotations

from tests.users.things import User, thing


@thing("I check a recipe before I train it.", is_long=False)
def check_a_recipe(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"))
    assert "train" in printed
    return printed.strip().splitlines()[-1]


@thing("I mistype a key.", is_long=False)
def mistype_a_key(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "optimizer.learning_rte=1", code=2)
    assert "unknown key" in printed
    return printed.strip()
