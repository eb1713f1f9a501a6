"""Formulas under their published names: what a user asks for, and what `mrl check` calls it."""

from __future__ import annotations

from tests.users.things import User, thing


@thing("I use IcePop: importance mis, not a mask.", is_long=False)
def use_icepop(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "algorithm.importance=mis")
    assert "mis of each token in [0.5, 5] (IcePop" in " ".join(printed.split())
    return "gspo, mis of each token in [0.5, 5] (IcePop)"


@thing("I use DPPO as published, its ratio against the engine's log-probs.")
def use_dppo(user: User) -> str:
    options = "name: cispo, clip_high: 19, importance: tis, importance_high: 20"
    recipe = [*user.recipe("run"), f"algorithm={{{options}, masks: [{{name: dppo}}]}}"]
    printed = " ".join(user.mrl("check", *recipe).split())
    assert "together DPPO, arXiv 2602.04879" in printed
    trained = user.mrl("train", *recipe, "train.num_steps=1")
    assert "run folder" in trained
    return "cispo with tis and the dppo mask: DPPO, and a step of it trains"


@thing("I use gspo_token, whose tokens all have their sample's advantage.", is_long=False)
def use_gspo_token(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "algorithm.name=gspo_token")
    assert "so it trains as gspo does" in " ".join(printed.split())
    return "every token has its sample's advantage, so it trains as gspo does"
